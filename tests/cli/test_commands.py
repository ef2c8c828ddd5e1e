"""`backends`, `ranges`, `quantize`, `check` and `explain`, as users call them; in this process, for speed."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import quantmark
from quantmark.annotators.blocks import clamp_bounds
from support.packed import packed

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose batch may vary, the same with a fixed one, and calibration data."""
    folder = tmp_path_factory.mktemp("files")
    model, (x,) = packed()
    rows = torch.export.Dim("rows", min=2, max=64)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: rows},)), folder / "model.pt2")
    torch.export.save(torch.export.export(model, (x[:2],)), folder / "fixed.pt2")
    np.savez(folder / "calib.npz", x=x.numpy())
    return folder


def test_from_a_program_to_a_checked_one(files: Path, tmp_path: Path, run: Run) -> None:
    out, page, table = tmp_path / "out.pt2", tmp_path / "out.html", tmp_path / "ranges.json"
    assert run("ranges", files / "model.pt2", "--data", files / "calib.npz", "-o", table)[0] == 0
    found = quantmark.RangeTable.from_json(table.read_text())
    assert {"x", "relu", "cat"} <= set(found)
    done = run(
        *("quantize", files / "model.pt2", "--data", files / "calib.npz", "--backend", "xnnpack"),
        *("--ranges", table, "-o", out, "--report", page),
    )
    assert done[0] == 0, done
    assert "0 errors" in done[1]
    assert done[1].splitlines()[-2:] == [str(out), str(page)]
    assert "Branches and joins" in page.read_text()
    assert "SQNR of the output" in page.read_text()
    assert re.search(r"^2 blocks, 2 decisions; ", done[1], re.MULTILINE)
    program = torch.export.load(out)
    model, (x,) = packed()
    assert quantmark.sqnr_db(model(x), program.module()(x)) > 25.0
    program.module()(x[:3])  # the batch still varies
    assert stat.S_IMODE(out.stat().st_mode) & stat.S_IRGRP == stat.S_IMODE(table.stat().st_mode) & stat.S_IRGRP
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.html", "out.pt2", "ranges.json"]
    status, text, _ = run("check", out, "--backend", "xnnpack")
    assert (status, "0 errors" in text) == (0, True)
    status, text, _ = run("check", out, "--json")
    assert (status, json.loads(text)["safe"]) == (0, True)


def test_a_fixed_batch_is_cut_out_of_the_data(files: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.pt2"
    status, *_ = run("quantize", files / "fixed.pt2", "--data", files / "calib.npz", "--backend", "cadence", "-o", out)
    assert status == 0
    assert torch.export.load(out).module()(torch.zeros(2, 8)).shape == (2, 8)


def test_an_unsafe_program_is_status_1(tmp_path: Path, run: Run) -> None:
    model, (x,) = packed()
    quantized = quantmark.quantize(model, [x], quantmark.configs.xnnpack())
    (relu,) = [n for n in quantized.model.graph.nodes if clamp_bounds(n)]
    for node in [user for q in relu.users for user in (q, *q.users)]:
        node.args = (*node.args[:2], int(node.args[2]) + 50, *node.args[3:])  # its zero point leaves quant_min
    torch.export.save(torch.export.export(quantized.model, (x,)), tmp_path / "broken.pt2")
    status, text, _ = run("check", tmp_path / "broken.pt2")
    assert status == 1
    assert "error" in text
    status, text, _ = run("check", tmp_path / "broken.pt2", "--json")
    assert (status, json.loads(text)["safe"]) == (1, False)
    codes = {finding["code"] for finding in json.loads(text)["findings"]}
    assert run("check", tmp_path / "broken.pt2", *(part for code in codes for part in ("--suppress", code)))[0] == 0


def test_explain_before_and_after_calibration(files: Path, tmp_path: Path, run: Run) -> None:
    status, text, _ = run("explain", files / "model.pt2", "--backend", "xnnpack")
    assert status == 0
    assert "cumsum" in text
    assert "not observed" in text
    status, text, _ = run(
        "explain", files / "model.pt2", "--backend", "xnnpack", "--data", files / "calib.npz", "--json"
    )
    assert status == 0
    assert json.loads(text)["observed"][0] == json.loads(text)["observed"][1]
    page = tmp_path / "page.html"
    status, text, _ = run("explain", files / "model.pt2", "--backend", "cadence", "-o", page)
    assert (status, text.strip()) == (0, str(page))
    assert page.read_text().startswith("<!doctype html>")


def test_backends_lists_every_config(run: Run) -> None:
    status, text, _ = run("backends")
    assert status == 0
    for shown in ("xnnpack", "cadence", "arm_tosa", "fused activations", "hoist rule", "always", "per channel"):
        assert shown in text
    status, text, _ = run("backends", "--json")
    assert {config["name"] for config in json.loads(text)} >= {"xnnpack", "cadence", "arm_tosa"}


def _quantize(files: Path, **changed: object) -> list[object]:
    given: dict[str, object] = {"model": files / "model.pt2", "--data": files / "calib.npz", "--backend": "xnnpack"}
    given |= {name if name == "model" else f"--{name}": value for name, value in changed.items()}
    return ["quantize", given.pop("model"), *(part for option in given.items() for part in option)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "gone.pt2"}, "there is no model gone.pt2"),
        ({"model": __file__}, f"{__file__} is no exported program; a .pt2 is what torch.export.save writes"),
        ({"backend": "xnpack"}, "there is no backend 'xnpack'; there are .*; nearest: xnnpack"),
        ({"data": "gone.npz"}, "there is no calibration data gone.npz"),
        ({"ranges": "gone.json"}, "there is no range table gone.json"),
        ({"ranges": __file__}, f"{__file__}: the range table is no JSON.*"),
        ({"output": "/nowhere/out.pt2"}, "the output /nowhere/out.pt2 can't be written: No such file or directory"),
        ({"output": "/"}, "the output / is a folder"),
    ],
)
def test_a_user_error_is_one_line_and_status_2(
    files: Path, tmp_path: Path, run: Run, changed: dict[str, object], message: str
) -> None:
    status, out, err = run(*_quantize(files, **{"output": tmp_path / "out.pt2", **changed}))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert re.fullmatch(f"error: {message}", err.strip()), err
    assert list(tmp_path.iterdir()) == []


def test_nan_in_the_data_names_the_file_and_leaves_nothing_behind(files: Path, tmp_path: Path, run: Run) -> None:
    _, (x,) = packed()
    x[5, 0] = float("nan")
    data = tmp_path / "calib"
    data.mkdir()
    np.savez(data / "a.npz", x=x[:4].numpy())
    np.savez(data / "b.npz", x=x[4:].numpy())
    status, _, err = run(*_quantize(files, data=data, output=tmp_path / "out.pt2"))
    assert (status, err) == (
        2,
        f"error: {data / 'b.npz'}: x holds 1 NaN or infinite value(s), first in row 1; mend or drop them\n",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["calib"]


def test_a_checkpoint_is_no_program(tmp_path: Path, run: Run) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt2")
    status, _, err = run("check", tmp_path / "model.pt2")
    assert status == 2
    assert err.startswith(f"error: {tmp_path / 'model.pt2'} is no exported program")
    assert len(err.splitlines()) == 1


def test_an_interrupted_run_leaves_nothing_half_written(
    files: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out.pt2").write_text("the old one")
    monkeypatch.setattr("quantmark.workflow.convert_pt2e", interrupt)
    status, out, err = run(*_quantize(files, output=tmp_path / "out.pt2"))
    assert (status, out, err) == (2, "", "error: interrupted\n")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.pt2", "the old one")]


def test_a_quantized_program_is_not_quantized_again(files: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.pt2"
    assert run(*_quantize(files, output=out))[0] == 0
    status, _, err = run(*_quantize(files, model=out, output=tmp_path / "twice.pt2"))
    assert (status, err) == (2, "error: the model is quantized already; give the float model\n")
    assert run("explain", out, "--backend", "xnnpack")[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["out.pt2"]
