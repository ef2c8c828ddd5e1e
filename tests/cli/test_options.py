"""Options of the backends (`--set`) and models from a function (`--model`), and what can be wrong with either."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quantmark
from quantmark import configs
from quantmark.cli.backends import _described
from quantmark.cli.options import backend_config, backend_names, backend_options
from quantmark.configs.base import BackendConfig, BlockRules
from support.packed import packed

Run = Callable[..., tuple[int, str, str]]

SOURCE = """
import torch
from torch import nn
from torch.export import export

def program():
    return export(nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), (torch.randn(2, 8),))

def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (torch.randn(2, 8),)

def nothing():
    return 3

def broken():
    raise ValueError("no weights\\nto be found")

def dynamic():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Branching(), (torch.randn(2, 8),)

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with a user's module and calibration data."""
    (tmp_path / "users_model.py").write_text(SOURCE)
    (tmp_path / "users_broken.py").write_text("import a_package_that_is_not_there\n")
    np.savez(tmp_path / "calib.npz", torch.randn(8, 8).numpy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return tmp_path


def test_every_option_of_every_factory_is_offered() -> None:
    for name in backend_names():
        options = {option.partition("=")[0]: meaning for option, meaning in backend_options(name).items()}
        parameters = inspect.signature(getattr(configs, name)).parameters
        assert list(options) == [key for key in parameters if key != "rest"]
        assert all(options.values())
        defaults = [option for option in backend_options(name) if not option.startswith("rest")]
        assert backend_config(name, defaults) == getattr(configs, name)()  # each default reads as itself


@pytest.mark.parametrize(
    ("backend", "options", "wanted"),
    [
        ("xnnpack", ["activation=sym8", "per_channel=false"], configs.xnnpack(activation="sym8", per_channel=False)),
        ("cadence", ["conflict=union", "max_sharing_loss_db=1"], None),
        ("cadence", ["hoist=none", "hoist=never"], configs.cadence(hoist=configs.HoistRule.NEVER)),
        ("arm_tosa", ["weight_bits=4", "int16=True"], configs.arm_tosa(weight_bits=4, int16=True)),
        ("xnnpack", ["estimator=minmax", "eps=1e-5"], configs.xnnpack(estimator="minmax", eps=1e-5)),
    ],
)
def test_values_are_read_as_the_factory_takes_them(
    backend: str, options: list[str], wanted: BackendConfig | None
) -> None:
    wanted = wanted or configs.cadence(conflict=configs.Conflict.UNION, max_sharing_loss_db=1.0)
    assert backend_config(backend, options) == wanted


@pytest.mark.parametrize(
    ("backend", "option", "message"),
    [
        (
            "xnnpack",
            "weight_bits=4",
            "xnnpack has no option 'weight_bits'; it has activation, per_channel, is_qat, .*",
        ),
        ("xnnpack", "activations=int8", "xnnpack has no option 'activations'; it has .*; nearest: activation"),
        ("xnnpack", "activation=int16", "xnnpack: activation is int8, sym8, not 'int16'"),
        ("xnnpack", "per_channel=1", "xnnpack: per_channel is true or false, not '1'"),
        ("xnnpack", "eps=small", "xnnpack: eps is a number, not 'small'"),
        ("xnnpack", "eps=-1", ".*eps.*"),
        ("xnnpack", "rest=none", "xnnpack has no option 'rest'; it has .*"),
        ("xnnpack", "estimator=min", "xnnpack: estimator is minmax, moving_average, .* or none, not 'min'"),
        ("xnnpack", "activation", "--set takes NAME=VALUE, got 'activation'; xnnpack has activation, .*"),
        ("cadence", "per_channel=true", "cadence has per_channel=False only: .*"),
        ("cadence", "hoist=sometimes", "cadence: hoist is never, identical, always or none, not 'sometimes'"),
        ("arm_tosa", "weight_bits=3", "arm_tosa has weight_bits=8 or 4, not 3"),
    ],
)
def test_an_option_that_a_backend_lacks_is_one_line(
    module: Path, run: Run, backend: str, option: str, message: str
) -> None:
    status, out, err = run(
        *("quantize", "--model", "users_model:pair", "--data", module / "calib.npz", "--backend", backend),
        *("--set", option, "-o", module / "out.pt2"),
    )
    assert (status, out) == (2, "")
    assert re.fullmatch(f"error: {message}", err.strip()), err
    assert len(err.splitlines()) == 1
    assert not (module / "out.pt2").exists()


def test_options_decide(module: Path, run: Run) -> None:
    what = ("--model", "users_model:pair", "--data", module / "calib.npz", "--backend", "cadence")
    assert run("quantize", *what, "--set", "activation=int16", "-o", module / "out.pt2")[0] == 0
    dtypes = {
        a for n in torch.export.load(module / "out.pt2").graph.nodes for a in n.args if isinstance(a, torch.dtype)
    }
    assert torch.int16 in dtypes
    status, text, _ = run("check", module / "out.pt2", "--backend", "cadence", "--set", "activation=int16", "--json")
    assert (status, json.loads(text)["safe"]) == (0, True)
    status, _, err = run("check", module / "out.pt2", "--set", "activation=int16")
    assert (status, err) == (2, "error: --set sets options of a backend: give --backend too\n")
    status, _, err = run("quantize", *what, "--set", "is_qat=true", "-o", module / "none.pt2")
    assert (status, len(err.splitlines())) == (2, 1)


@pytest.mark.parametrize("function", ["program", "pair"])
def test_a_model_from_a_function(module: Path, run: Run, function: str) -> None:
    source = ("--model", f"users_model:{function}")
    assert run("ranges", *source, "--data", module / "calib.npz", "-o", module / "ranges.json")[0] == 0
    table = ("--ranges", module / "ranges.json")
    done = run(
        "quantize", *source, "--backend", "xnnpack", *table, "-o", module / "out.pt2", "--report", module / "a.html"
    )
    assert done[0] == 0, done
    assert f"users_model:{function}" in (module / "a.html").read_text()
    assert run("check", module / "out.pt2", "--backend", "xnnpack", *table)[0] == 0
    status, text, _ = run("explain", *source, "--backend", "xnnpack")
    assert (status, "linear" in text) == (0, True)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "give a MODEL.pt2 or --model PACKAGE.MODULE:FUNCTION; neither is given"),
        (["model.pt2", "--model", "users_model:pair"], "give a MODEL.pt2 or --model .*; both are given"),
        (["--model", "users_model"], "--model users_model: takes PACKAGE.MODULE:FUNCTION"),
        (
            ["--model", "users_modle:pair"],
            "--model .*: importing users_modle failed: ModuleNotFoundError: .*",
        ),
        (["--model", "users_broken:pair"], "--model .*: importing users_broken failed: ModuleNotFoundError: .*"),
        (["--model", "users_model:pairs"], "--model .*: users_model has no function pairs; nearest: pair"),
        (["--model", "users_model:NUMBER"], "--model .*: users_model has no function NUMBER.*"),
        (
            ["--model", "users_model:nothing"],
            "--model .*: the function must return an Exported.* returned a int",
        ),
        (["--model", "users_model:broken"], "--model .*: the function raised ValueError: no weights"),
        (["--model", "users_model:dynamic"], "--model .*: the model can't be exported: .*"),
    ],
)
def test_a_function_that_yields_no_model_is_one_line(run: Run, source: list[str], message: str) -> None:
    status, out, err = run("explain", *source, "--backend", "xnnpack")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert re.fullmatch(f"error: {message}", err.strip()), err


@pytest.mark.parametrize("command", ["ranges", "quantize", "explain", "sensitivity", "check", "backends", "demo"])
def test_help_suffices(run: Run, command: str) -> None:
    """Each option is said to be something, and what runs code says so."""
    status, text, _ = run(command, "--help")
    assert status == 0
    plain = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    assert ("runs code" in plain) == (command in {"ranges", "quantize", "explain", "sensitivity"})
    assert ("--set NAME=VALUE options of the backend" in plain) == (
        command in {"ranges", "quantize", "explain", "sensitivity", "check"}
    )


X = torch.randn(8, 8).numpy()


@pytest.mark.parametrize("command", ["ranges", "quantize", "sensitivity"])
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"arr_0": X[:, :7]}, r"data.npz: input has shape \(8, 7\), the model takes \(2, 8\)"),
        ({"a": X, "b": X}, "data.npz lacks input; it holds a, b"),
        ({"arr_0": X[:0]}, r"data.npz: input is empty, of shape \(0, 8\)"),
        (
            {"arr_0": X * np.nan},
            r"data.npz: input holds 64 NaN or infinite value\(s\), first in row 0; mend or .*",
        ),
        ({"arr_0": X.astype(int)}, "data.npz: input is of torch.int64, the model takes torch.float32"),
    ],
)
def test_data_that_do_not_fit_are_one_line(
    module: Path, run: Run, command: str, arrays: dict[str, np.ndarray[Any, Any]], message: str
) -> None:
    np.savez("data.npz", **arrays)
    given = ["--model", "users_model:pair", "--data", "data.npz"]
    given += [] if command == "ranges" else ["--backend", "xnnpack"]
    given += [] if command == "sensitivity" else ["-o", "out"]
    before = sorted(path.name for path in module.iterdir())
    status, out, err = run(command, *given)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"error: {message}", err.strip()), err
    assert sorted(path.name for path in module.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing(module: Path, number: int) -> None:
    (module / "stops.py").write_text(
        "import os, signal\n"
        "if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def model():\n    os.kill(os.getpid(), {int(number)})\n    return 0\n"
    )
    (module / "out.pt2").write_text("the old one")
    command = [sys.executable, "-m", "quantmark", "quantize", "--model", "stops:model", "--backend", "xnnpack"]
    done = subprocess.run(
        [*command, "--data", "calib.npz", "-o", "out.pt2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: interrupted\n")
    assert (module / "out.pt2").read_text() == "the old one"
    assert [path.name for path in module.iterdir() if path.name.startswith(".")] == []


@pytest.mark.arm
def test_ranges_of_the_parts_that_a_backend_takes_ops_into(tmp_path: Path, run: Run) -> None:
    x = torch.randn(2, 3, 8)
    torch.export.save(torch.export.export(torch.nn.Softmax(-1), (x,)), tmp_path / "model.pt2")
    np.savez(tmp_path / "data.npz", input=x.numpy())
    command = ["ranges", tmp_path / "model.pt2", "--data", tmp_path / "data.npz", "-o", tmp_path / "ranges.json"]
    assert run(*command)[0] == 0
    plain = quantmark.RangeTable.from_json((tmp_path / "ranges.json").read_text())
    assert run(*command, "--backend", "arm_tosa")[0] == 0
    parts = quantmark.RangeTable.from_json((tmp_path / "ranges.json").read_text())
    assert set(plain) < set(parts)
    assert run(*command, "--set", "activation=int16")[0] == 2


def test_check_with_ranges(tmp_path: Path, run: Run) -> None:
    model, (x,) = packed()
    result = quantmark.quantize(model, [x], configs.xnnpack(), progress=False)
    torch.export.save(torch.export.export(result.model, (x,)), tmp_path / "model.pt2")
    table = quantmark.observe_ranges(torch.export.export(model, (x,)), [x, 100.0 * x])
    (tmp_path / "ranges.json").write_text(table.to_json())
    status, text, _ = run("check", tmp_path / "model.pt2", "--ranges", tmp_path / "ranges.json")
    assert (status, "QM308" in text) == (0, True)
    assert "QM308" not in run("check", tmp_path / "model.pt2")[1]
    (tmp_path / "ranges.json").write_text(quantmark.RangeTable.of({"stale": (0.0, 1.0)}).to_json())
    status, _, err = run("check", tmp_path / "model.pt2", "--ranges", tmp_path / "ranges.json")
    assert (status, len(err.splitlines())) == (2, 1)
    assert err.startswith("error: no entry of the range table is for a node of the checked model")


def test_a_rule_that_says_nothing_has_no_row() -> None:
    plain = BackendConfig(blocks=BlockRules(residual_heads=frozenset(), residual_activations=frozenset()))
    assert "fused elsewhere" not in _described(plain)
    assert all(_described(plain).values())
    assert "fused elsewhere" in _described(configs.xnnpack())
