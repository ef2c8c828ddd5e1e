"""Colours of the page: text can be read on what it stands on, in either mode (WCAG 2.1: 4.5 to 1; graphics 3 to 1)."""

from __future__ import annotations

import re

import pytest

from quantmark.reports.style import GROUP_COLOURS, STYLE

ROOTS = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
LIGHT = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", ROOTS[0]))
DARK = LIGHT | dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", ROOTS[1]))
GROUPS = [f"g{number}" for number in range(GROUP_COLOURS)]
TEXTS = [
    *[(ink, ground) for ink in ("ink", "soft") for ground in ("bg", "card", "track")],
    *[(ink, "card") for ink in ("accent", "red", "amber", "green", *GROUPS)],
    *[(f"{ink}", f"{ink}-bg") for ink in ("red", "amber", "green")],
    ("card", "accent"),
]
GRAPHICS = [*[(group, ground) for group in GROUPS for ground in ("card", "track")], ("zero", "card")]


def luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_apart(colours: dict[str, str]) -> None:
    assert contrast("#000", "#fff") == pytest.approx(21.0)
    weak = [(a, b, r) for a, b in TEXTS if (r := round(contrast(colours[a], colours[b]), 2)) < 4.5]
    weak += [(a, b, r) for a, b in GRAPHICS if (r := round(contrast(colours[a], colours[b]), 2)) < 3.0]
    assert weak == []
