"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantmark import configs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_blocks_run_one_after_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("python")
    assert len(found) == 5
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(found):
        exec(compile(block, f"README block {number}", "exec"), namespace)
    assert re.match(r"[34]\d\.\d dB\n0 errors, ", capsys.readouterr().out)


def test_the_two_commands() -> None:
    assert blocks("sh") == [
        "pip install -c constraints.txt -e . && python -m quantmark demo\n",
        "pip install -c constraints.txt -e '.[test]' && pytest\n",
    ]


def test_every_config_is_in_the_table() -> None:
    listed = re.findall(r"^\| `configs\.(\w+)\(\)`", README, re.MULTILINE)
    factories = [name for name in configs.__all__ if name.islower()]
    assert sorted(listed) == sorted(factories)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
