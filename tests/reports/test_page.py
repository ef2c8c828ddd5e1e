"""The page: whole, by itself, and true to what was decided."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quantmark import measure_sqnr, sensitivity
from quantmark import quantize as package_quantize
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.checks import check
from quantmark.reports import explain
from quantmark.reports.axis import Axis
from quantmark.reports.page import page
from support.flow import export, minmax_config, quantize
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


def packed_page(title: str = "packed.pt2", *, measured: bool = False) -> str:
    model, inputs = packed()
    quantizer = BackendQuantizer(minmax_config())
    flow = quantize(model, inputs, quantizer)
    sqnr = measure_sqnr(model, flow.converted, [inputs], progress=False) if measured else None
    return page(explain(quantizer, sqnr), check(flow.converted, minmax_config()), title=title)


@pytest.mark.parametrize("measured", [False, True])
def test_it_is_whole_and_needs_nothing_from_elsewhere(measured: bool) -> None:
    text = packed_page(measured=measured)
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not re.search(r"https?:|src=|@import|url\(|<link|<img|<iframe|fetch\(|import\(", text)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    ids = {value for name, value in reader.attributes if name == "id"}
    links = [value or "" for name, value in reader.attributes if name == "href"]
    assert links
    assert {link.removeprefix("#") for link in links} <= ids, "every link leads to a place on the page"
    assert len(ids) == len([name for name, _ in reader.attributes if name == "id"])
    assert "prefers-color-scheme: dark" in text


def test_the_only_script_is_the_one_that_the_policy_names() -> None:
    text = packed_page()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.split("; ")[0] == "default-src 'none'"
    assert f"script-src 'sha256-{digest}'" in policy.split("; ")
    assert 'createElement("button")' in script, "a heading is sorted by with the keyboard, too"
    assert all(f'"{state}"' in script for state in ("aria-sort", "ascending", "descending", "none"))


HOSTILE = ("<script>alert(1)</script>", 'a" onclick=alert(2) x="', "</title><img src=x onerror=alert(3)>", "&lt;b&gt;")


class Hostile(nn.Module):
    """A module whose name would be markup if it were not escaped."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE[0], nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return torch.cat([x, x * 2.0], 1)


def test_hostile_names_are_text() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    graph = export(Hostile().eval(), (x,))
    relus = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    for node, path in zip(relus, HOSTILE[1:3], strict=True):  # torch's own code stumbles over modules of such names
        node.meta["nn_module_stack"] = {"m": (path, "torch.nn.ReLU")}
    quantizer = BackendQuantizer(minmax_config())
    flow = quantize(graph, (x,), quantizer)
    sqnr = measure_sqnr(graph, flow.converted, [x], progress=False)
    found = explain(quantizer, sqnr)
    assert {op.module for op in found.ops} > {HOSTILE[1], HOSTILE[2]}
    text = page(found, check(flow.converted, minmax_config()), title=HOSTILE[3])
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert text.count("<script") == 1
    assert "<img" not in text
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<h1>&amp;lt;b&amp;gt;</h1>" in text


def test_measured_numbers_stand_beside_predicted_ones() -> None:
    model, inputs = packed()
    done = package_quantize(model, [inputs], minmax_config(), progress=False)
    sqnr = measure_sqnr(model, done, [inputs], progress=False)
    text = page(explain(done.model, sqnr))
    (at,) = (index for index, losses in enumerate(sqnr.losses_db) if "relu" in losses)
    assert f'title="measured loss" data-t="measured loss">{sqnr.losses_db[at]["relu"]:.2f} dB' in text
    assert f'title="SQNR" data-t="SQNR">{sqnr.of("relu"):.1f} dB' in text
    assert f"{sqnr.worst_db:.1f} dB</b><span>SQNR of the output" in text
    assert f'data-v="{sqnr.worst_db!r}"' in text, "the table sorts by the number itself"
    assert text.count("<table class=sort>") >= 3
    assert "Accuracy" not in page(explain(done.model))


def test_sensitivity_is_listed() -> None:
    model, (x,) = packed()
    done = package_quantize(model, [x], minmax_config(), progress=False)
    assert 'id="sensitivity"' not in page(explain(done.model))
    for by in ("block", "module"):
        costs = sensitivity(model, [x], minmax_config(), by=by, progress=False)
        text = page(explain(done.model), done.report, costs)
        section = text[text.index('<h2 id="sensitivity"') : text.index('<h2 id="graph"')]
        assert section.count("<tr>") == 1 + 1 + len(costs.parts)
        assert all(f'data-v="{part.worst_db!r}"' in section for part in costs.parts)


def test_many_decisions_are_folded() -> None:
    from support.large import large

    model, inputs = large(stages=1, cells=5)
    quantizer = BackendQuantizer(minmax_config())
    quantize(model, inputs, quantizer)
    found = explain(quantizer)
    assert len(found.decisions) > 8
    text = page(found)
    assert text.count('<details class="card') == len(found.decisions)
    assert len(re.findall(r'<details class="card[^>]* open>', text)) == found.counts()["decisions to look at"]


def test_it_shows_ranges_groups_outcomes_losses_contracts_and_findings() -> None:
    text = packed_page()
    for shown in ("independent", "requantize", "group 1", "group 2", "not <b>shared</b>", "[0, inf]", "is the clamp"):
        assert shown in text
    assert re.search(r"largest predicted loss \d+\.\d\d dB, as its output is", text)
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
