"""Node data for Model Explorer, held against the format that its `node_data_builder.py` documents."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from quantmark import InputError, configs, measure_sqnr, quantize, sensitivity
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.reports import explain, node_data
from quantmark.reports.node_data import Value
from support.flow import export, minmax_config
from support.flow import quantize as flow
from support.packed import packed

COLOUR = re.compile(r"#[0-9a-f]{6}")
FIELDS = {
    "results",
    "thresholds",
    "gradient",
    "hideInAggregatedStatsTable",
    "hideInChildrenStatsTable",
    "hideAggregatedStats",
    "showExpandedSummaryOnGroupNode",
    "showLabelCountColumnsInChildrenStatsTable",
}


def valid(text: str) -> dict[str, float]:
    """Hold JSON text against the format, and return node -> value."""
    content: dict[str, Any] = json.loads(text)
    assert list(content) == ["graph"]
    (graph,) = content.values()
    assert set(graph) <= FIELDS
    for result in graph["results"].values():
        assert set(result) <= {"value", "bgColor", "textColor"}
        assert isinstance(result["value"], (int, float))
        assert math.isfinite(result["value"])
    values = {node: result["value"] for node, result in graph["results"].items()}
    assert ("thresholds" in graph) != ("gradient" in graph)
    ends = [step["value"] for step in graph.get("thresholds", [])]
    assert ends == sorted(set(ends))
    if ends:
        assert max(values.values()) <= ends[-1], "beyond the last threshold a node has no colour"
    stops = [step["stop"] for step in graph.get("gradient", [])]
    assert stops in ([], [0.0, 1.0])
    for step in [*graph.get("thresholds", []), *graph.get("gradient", [])]:
        assert set(step) <= {"value", "stop", "bgColor", "textColor"}
        assert all(COLOUR.fullmatch(step[key]) for key in ("bgColor", "textColor") if key in step)
    return values


def test_of_an_explanation() -> None:
    model, (x,) = packed()
    done = quantize(model, [x], minmax_config(), progress=False)
    measured = measure_sqnr(model, done, [x], progress=False)
    found = explain(done.model, measured)
    names = {node.name for node in export(model, (x,)).graph.nodes}
    values = valid(node_data(found))
    assert set(values) <= names, "the nodes are called as in the program"
    assert values == {node: measured.of(node) for node in values}
    assert "x" not in values, "a float input is exact"
    assert valid(node_data(measured)) == values
    assert set(valid(node_data(found, "rounding_db"))) < set(values)
    bits = valid(node_data(found, "bits"))
    assert (bits["relu"], bits["cumsum"], "linear" in bits) == (8, 32, False)
    numbers = found.groups[found.op("cat").output].numbers
    assert numbers is not None
    assert valid(node_data(found, "scale"))["cat"] == numbers.scale


def test_of_wide_roots() -> None:
    model, (x,) = packed()
    done = quantize(model, [x], configs.cadence(activation="int16"), progress=False)
    assert set(valid(node_data(explain(done.model), "bits")).values()) == {16, 32}


def test_of_a_sensitivity() -> None:
    model, (x,) = packed()
    found = sensitivity(model, [x], minmax_config(), progress=False)
    values = valid(node_data(found))
    assert values == {node: part.worst_db for part in found.parts for node in part.nodes}
    assert values["linear"] == values["relu"], "a block's nodes have its number"
    assert valid(node_data(found, output=0)) == values
    with pytest.raises(InputError, match="no output 1; the model has 1"):
        node_data(found, output=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sqnr_db", "measure them with measure_sqnr or sensitivity"),
        ("rounding_db", "measure them with measure_sqnr"),
        ("colour", "no node data 'colour'; there are sqnr_db, rounding_db, bits, scale"),
    ],
)
def test_what_is_not_there_is_an_error(value: Value, message: str) -> None:
    model, inputs = packed()
    quantizer = BackendQuantizer(minmax_config())
    flow(model, inputs, quantizer)
    with pytest.raises(InputError, match=message):
        node_data(explain(quantizer), value)
