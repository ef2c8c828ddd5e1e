"""The examples run, and show what they say they show."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packed() -> ModuleType:
    return load("packed_features")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_packed_features_at_other_seeds(packed: ModuleType, seed: int) -> None:
    shows_the_story(packed, seed)


def test_packed_features(packed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    results, data = shows_the_story(packed, 0)
    heading, rows = packed.tabulated(results, data)
    lines = packed.as_markdown(heading, rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert not capsys.readouterr().out


def shows_the_story(packed: ModuleType, seed: int) -> tuple[list[object], object]:
    results, data = packed.compare(epochs=100, seed=seed)
    by = {(r.name, r.when): r for r in results}
    cadence, spoilt = by["Cadence", "before"], by["Cadence", "after"]
    before, after = by["quantmark", "before"], by["quantmark", "after"]
    assert not spoilt.identical
    assert after.identical
    assert by["union", "after"].identical
    assert (before.right, before.logits_db, before.towers_db) == (after.right, after.logits_db, after.towers_db)
    assert after.logits_db > 20.0, "8 bits, one scale a weight"
    assert after.logits_db > spoilt.logits_db + 20.0
    assert after.logits_db > cadence.logits_db - 1.0
    assert all(ours > theirs - 1.0 for ours, theirs in zip(after.towers_db, cadence.towers_db, strict=True))
    assert after.right >= by["float", ""].right - 3
    assert after.right > spoilt.right + 20
    assert after.float_macs == packed.WIDTH * min(packed.SIZES), "the cheapest tower alone stays float"
    assert cadence.float_macs == by["union", "after"].float_macs == 0
    return results, data
