"""The picture of the graph: legible at any size, true to the graph."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quantmark import configs, measure_sqnr, quantize
from quantmark.reports import explain
from quantmark.reports.lanes import lay_out
from quantmark.reports.overview import CHARACTER, FONT, ROW, WIDTH, cut
from quantmark.reports.page import page
from support.flow import minmax_config
from support.large import large
from support.packed import packed

REQUANTIZED = '<path class="e r"'


class Labels(HTMLParser):
    """The texts of each SVG: (left, right, baseline) in pixels, as wide as they can get."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pieces: list[list[tuple[float, float, float, str]]] = []
        self.at: tuple[float, float, bool] | None = None
        self.words = ""
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "svg":
            self.pieces.append([])
        elif tag == "text":
            self.at = float(found["x"] or 0), float(found["y"] or 0), (found.get("class") or "").startswith("d")
            self.words = ""
        elif tag == "tspan":
            self.words += " "
        elif tag == "a":
            self.links.append(found["href"] or "")

    def handle_data(self, data: str) -> None:
        if self.at is not None:
            self.words += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "text" and self.at is not None:
            x, y, ends = self.at
            width = len(self.words) * CHARACTER
            self.pieces[-1].append((x - width, x, y, self.words) if ends else (x, x + width, y, self.words))
            self.at = None


def large_page(**how: int) -> tuple[Any, str]:
    model, (x,) = large(**how)
    done = quantize(model, [x], configs.xnnpack(estimator="minmax"), progress=False)
    found = explain(done.model, measure_sqnr(model, done, [x], progress=False))
    return found, page(found, done.report, title="large.pt2")


def test_500_nodes_are_legible_and_small() -> None:
    found, text = large_page()
    assert len(found.ops) > 450
    assert len(text.encode()) < 1_000_000
    labels = Labels(text)
    assert len(labels.pieces) == 3
    assert sum(map(len, labels.pieces)) > 500
    for piece in labels.pieces:
        assert all(0 <= left <= right <= WIDTH for left, right, _, _ in piece)
        rows: dict[float, list[tuple[float, float]]] = {}
        for left, right, y, _ in piece:
            rows.setdefault(y, []).append((left, right))
        assert all(after - before >= ROW > FONT for before, after in pairwise(sorted(rows)))
        assert all(a[1] < b[0] for row in rows.values() for a, b in pairwise(sorted(row)))
    ids = set(re.findall(r"<tr id=(\w+)>", text)) | set(re.findall(r'<h2 id="([\w-]+)"', text))
    assert {link.removeprefix("#") for link in labels.links} <= ids


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 0)])
def test_names_of_any_length_stay_in_their_room(low: int, high: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a_module_with_a_name_that_is_longer_than_a_column_is_wide" * (1 + low), nn.Linear(4, 4))
            self.add_module("short" * (1 + 30 * high), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            return x

    import torch

    x = torch.randn(2, 4)
    done = quantize(Named().eval(), [x], minmax_config(), progress=False)
    labels = Labels(page(explain(done.model)))
    assert all(right <= WIDTH for piece in labels.pieces for _, right, _, _ in piece)
    assert [cut("abcdef", room) for room in (6, 5, 1, 0, -2)] == ["abcdef", "abcd…", "…", "", ""]


def test_edges_show_what_is_requantized_and_read_in_float() -> None:
    model, (x,) = packed()
    done = quantize(model, [x], minmax_config(), progress=False)
    found = explain(done.model)
    text = page(found)
    assert text.count(REQUANTIZED) == found.counts()["edges requantized"] == 1
    assert '<path class="e f"' in text, "cumsum's output is float"
    assert found.op("cumsum").reads == ("cat",)
    assert found.op("slice_1").reads == ("x",)
    assert found.outputs == ("cumsum",)
    for kind in ("k block", "k joined", "k moved", "k float", "k input", "k output"):
        assert f'class="{kind}' in text, kind


GRAPHS = st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=40)


@given(GRAPHS)
def test_lanes_never_cross_a_thing_that_is_not_theirs(graph: list[list[int]]) -> None:
    things = [(str(i), [str(read) for read in reads if read < i]) for i, reads in enumerate(graph)]
    placed = lay_out(things, {name: row for row, (name, _) in enumerate(things)})
    assert list(placed) == [name for name, _ in things]
    for name, reads in things:
        assert placed[name].sources == tuple(dict.fromkeys(reads))
    for one in placed.values():
        passed = [other for other in placed.values() if one.row < other.row < one.last and other.lane == one.lane]
        assert passed == [], "a tensor's lane is its own until the last op that reads it"


def test_a_chain_is_one_lane_and_a_skip_a_second() -> None:
    chain = lay_out([("a", []), ("b", ["a"]), ("c", ["b"])], {"a": 0, "b": 1, "c": 2})
    assert [each.lane for each in chain.values()] == [0, 0, 0]
    skip = lay_out([("a", []), ("b", ["a"]), ("c", ["b", "a"])], {"a": 0, "b": 1, "c": 2})
    assert [each.lane for each in skip.values()] == [0, 1, 0]
    assert skip["a"].last == 2
