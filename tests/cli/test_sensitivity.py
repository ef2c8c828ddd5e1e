"""`quantmark sensitivity`, as users call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantmark import configs, sensitivity
from support.packed import packed

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    model, (x,) = packed()
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    np.savez(tmp_path / "calib.npz", x=x.numpy())
    np.savez(tmp_path / "test.npz", x=x.numpy() * 0.5)
    return tmp_path


def test_tables_json_and_node_data(files: Path, run: Run) -> None:
    what = ("sensitivity", files / "model.pt2", "--backend", "xnnpack", "--data", files / "calib.npz")
    status, text, _ = run(*what, "--test", files / "test.npz")
    assert status == 0
    model, (x,) = packed()
    wanted = sensitivity(model, [x], configs.xnnpack(), batches=[x * 0.5], progress=False)
    assert text.strip() == str(wanted)
    out = files / "nodes.json"
    status, text, err = run(*what, "--by", "module", "--json", "--node-data", out)
    assert (status, json.loads(text)["by"]) == (0, "module")
    assert err.strip().endswith("nodes.json")
    assert set(json.loads(out.read_text())["graph"]["results"]) >= {"relu", "linear_1"}


def test_errors_are_one_line(files: Path, run: Run) -> None:
    data = ("--data", files / "calib.npz")
    status, _, err = run("sensitivity", files / "model.pt2", "--backend", "xnpack", *data)
    assert (status, "xnnpack" in err) == (2, True)
    status, _, err = run(
        "sensitivity", files / "none.pt2", "--backend", "xnnpack", *data, "--node-data", files / "n.json"
    )
    assert (status, "there is no model" in err) == (2, True)
    assert sorted(path.name for path in files.iterdir()) == ["calib.npz", "model.pt2", "test.npz"]
