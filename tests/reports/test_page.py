"""The page: whole, by itself, and true to what was decided."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.checks import check
from quantmark.reports import explain
from quantmark.reports.axis import Axis
from quantmark.reports.page import page
from support.flow import minmax_config, quantize
from support.packed import packed

VOID = {"meta", "input", "br"}
END = st.floats(min_value=-1e30, max_value=1e30, allow_subnormal=False)


class Reader(HTMLParser):
    """Follows the tags, and fails where one is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def packed_page(title: str = "packed.pt2") -> str:
    model, inputs = packed()
    quantizer = BackendQuantizer(minmax_config())
    flow = quantize(model, inputs, quantizer)
    return page(explain(quantizer), check(flow.converted, minmax_config()), title=title)


def test_it_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = packed_page()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img", text)
    assert not [name for name, _ in reader.attributes if name in {"src", "href"} or name.startswith("on")]
    assert "prefers-color-scheme: dark" in text


def test_it_shows_ranges_groups_outcomes_losses_contracts_and_findings() -> None:
    text = packed_page()
    for shown in ("independent", "requantize", "group 1", "group 2", "not <b>shared</b>", "[0, inf]", "is the clamp"):
        assert shown in text
    assert re.search(r"worst predicted loss \d+\.\d\d dB", text)
    assert "cumsum" in text
    bars = re.findall(r'class="bar [^"]*" style="--a:([-\d.]+);--w:([-\d.]+);--la:([-\d.]+);--lw:([-\d.]+)"', text)
    assert len(bars) == 3 + 3  # the root and two branches; the join and two operands
    for bar in bars:
        left, width, log_left, log_width = map(float, bar)
        assert 0.0 <= left <= left + width <= 100.01
        assert 0.0 <= log_left <= log_left + log_width <= 100.01


def test_names_are_escaped() -> None:
    assert "<b>bold" not in packed_page("<b>bold")
    assert "&lt;b&gt;bold" in packed_page("<b>bold")


@given(st.lists(st.tuples(END, END).map(lambda ends: (min(ends), max(ends))), max_size=6), st.booleans())
def test_an_axis_holds_all_ranges_in_order(ranges: list[tuple[float, float]], log: bool) -> None:
    axis = Axis.of(ranges, log=log)
    ends = sorted({end for range_ in ranges for end in range_} | {0.0})
    places = [axis.percent(end) for end in ends]
    assert places == sorted(places)
    assert all(-0.01 <= place <= 100.01 for place in places)
    ticks = axis.ticks()
    assert 0.0 in ticks
    assert len(ticks) <= 13
    assert ticks == sorted(ticks)


@pytest.mark.parametrize(
    ("range_", "log", "ticks"),
    [
        ((-1.0, 100.0), False, [0, 20, 40, 60, 80, 100]),
        ((0.0, 6.0), False, [0, 1, 2, 3, 4, 5, 6]),
        ((-1.0, 100.0), True, [-1, 0, 1, 10, 100]),
        ((0.0, 0.0), False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks(range_: tuple[float, float], log: bool, ticks: list[float]) -> None:
    assert Axis.of([range_], log=log).ticks() == pytest.approx(ticks)
