"""Call a command as a user does, in this process, for speed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from quantmark.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and gives its exit status, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quantmark", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capfd.readouterr()
        return int(exited.value.code or 0), out, err

    return call
