"""The command line, as users call it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantmark", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", **env},
    )


def test_the_demo(tmp_path: Path) -> None:
    done = run("demo", "--epochs", "2", "--output", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "float.pte",
        "xnnpackquantizer.pte",
        "quantmark.pte",
    }
    rows = {line[2:26].strip(): line.split()[-4:] for line in done.stdout.splitlines() if line.startswith("  ")}
    *_, ours, verdict = rows["SQNR in dB, runtime"]
    assert float(ours) > 33
    assert verdict in {"better", "equal", "worse"}
    assert "7 of 7" in done.stdout
    assert "6 of 6" in done.stdout
    assert rows["XNNPACK delegates"] == ["1", "1", "1", "equal"]
    assert re.search(r"^Checks of quantmark's graph: 0 errors", done.stdout, re.MULTILINE)
    assert str(tmp_path / "out") in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "error: --epochs must be at least 1, got 0\n"),
        (["--output", __file__], f"error: --output {__file__} can't be made a folder: File exists\n"),
    ],
)
def test_a_user_error_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = run("demo", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_an_unknown_option_is_status_2_too() -> None:
    assert run("demo", "--epoch", "1").returncode == 2
    assert run("demonstrate").returncode == 2


def test_help_says_it_all_and_imports_nothing_heavy() -> None:
    done = run("demo", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    for option in ("--seed", "--epochs", "--output", "--help"):
        assert option in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tyro" in imported
    assert imported.isdisjoint({"torchao", "executorch", "sklearn", "torch.export"})
