"""Range tables apart from any graph: round trips, merging, and what is said of a bad one."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantmark.observers.errors import InputError, MissingRangeError
from quantmark.observers.estimators import HistogramEstimator, MinMaxEstimator
from quantmark.observers.histogram import BINS
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC
from quantmark.observers.ranges import Range
from quantmark.observers.table import SCHEMA, Entry, RangeTable

ends = st.floats(-1e30, 1e30)
ranges = st.tuples(ends, ends).map(lambda pair: Range(min(pair), max(pair)))
histograms = st.none() | st.dictionaries(st.integers(0, BINS - 1), st.integers(1, 2**40), max_size=8)
entries = st.builds(Entry, ranges, histograms)
tables = st.dictionaries(st.text(max_size=12), entries, max_size=5).map(RangeTable)


@given(tables)
def test_json_brings_back_the_very_same_table(table: RangeTable) -> None:
    text = table.to_json()
    assert RangeTable.from_json(text) == table
    assert RangeTable.from_json(text).to_json() == text
    assert json.loads(text)["schema"] == SCHEMA


def test_the_form_is_one_entry_a_line() -> None:
    table = RangeTable({"conv2d": Entry(Range(-1.5, 2.0), {7: 3, 2: 1}), "x": Entry(Range(0.0, 1.0))})
    assert table.to_json().splitlines() == [
        '{"schema": 1, "ranges": {',
        '  "conv2d": {"min": -1.5, "max": 2.0, "histogram": {"bins": [2, 7], "counts": [1, 3]}},',
        '  "x": {"min": 0.0, "max": 1.0}',
        "}}",
    ]


@given(st.lists(tables, min_size=1, max_size=4))
def test_merging_is_associative_and_does_not_care_for_order(shards: list[RangeTable]) -> None:
    merged = shards[0].merge(*shards[1:])
    assert merged.entries == shards[-1].merge(*shards[-2::-1]).entries
    assert merged == reduce(RangeTable.merge, shards)


@pytest.mark.parametrize("kind", [MinMaxEstimator, HistogramEstimator])
def test_merged_shards_are_one_run(kind: type[MinMaxEstimator]) -> None:
    batches = [torch.randn(100, generator=torch.Generator().manual_seed(i)) * 3**i for i in range(4)]

    def table(batches: list[torch.Tensor]) -> RangeTable:
        estimator = kind()
        for batch in batches:
            estimator.update(batch)
        entry = Entry.of(estimator)
        assert entry is not None
        return RangeTable({"x": entry})

    once = table(batches)
    merged = table(batches[:1]).merge(table(batches[3:]), RangeTable.from_json(table(batches[1:3]).to_json()))
    assert merged == once
    for scheme in (INT8_AFFINE, INT8_SYMMETRIC):
        assert merged["x"].estimator().range(scheme) == once["x"].estimator().range(scheme)


@pytest.mark.parametrize("kind", [MinMaxEstimator, HistogramEstimator])
def test_an_estimator_made_from_an_entry_is_in_the_same_state(kind: type[MinMaxEstimator]) -> None:
    estimator = kind()
    estimator.update(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    entry = Entry.of(estimator)
    assert entry is not None
    restored = entry.estimator()
    assert type(restored) is kind
    for name, value in estimator.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name


def test_nothing_seen_is_no_entry() -> None:
    assert Entry.of(MinMaxEstimator()) is None
    assert Entry.of(HistogramEstimator()) is None


def test_a_histogram_survives_only_where_both_shards_have_one() -> None:
    plain, full = Entry(Range(0.0, 1.0)), Entry(Range(0.5, 2.0), {3: 4})
    assert plain.merge(full) == Entry(Range(0.0, 2.0)) == full.merge(plain)


def test_a_table_written_by_hand_reads_like_a_mapping() -> None:
    table = RangeTable.of({"x": (-1, 1.7), "y": Range(0.0, 100.0)})
    assert table["x"].range == Range(-1.0, 1.7)
    assert list(table) == ["x", "y"]
    assert len(table) == 2
    assert "y" in table
    assert "z" not in table


def test_an_end_that_no_float_holds_is_named() -> None:
    with pytest.raises(InputError, match="entry 'x': int too large"):
        RangeTable.of({"x": (0, 10**400)})


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    table = RangeTable.of({"conv2d": (0, 1), "conv2d_1": (0, 1), "linear": (0, 1)})
    with pytest.raises(MissingRangeError, match=r"no entry 'conv2d_2' \(nearest: conv2d_1, conv2d\)"):
        table["conv2d_2"]


def test_missing_and_unknown_nodes_are_named() -> None:
    table = RangeTable.of({"conv2d": (0, 1), "lnear": (0, 1)})
    with pytest.raises(MissingRangeError, match=r"lacks 1 node\(s\).*'conv2d_1' \(nearest: conv2d\)"):
        table.require(["conv2d", "conv2d_1"], ["conv2d", "conv2d_1", "lnear"])
    with pytest.raises(MissingRangeError, match=r"names 1 node\(s\) that the graph lacks: 'lnear' \(nearest: linear\)"):
        table.require(["conv2d"], ["conv2d", "linear"])
    with pytest.raises(MissingRangeError, match="and 15 more"):
        table.require([f"n{i}" for i in range(25)], [])
    table.require(["conv2d"], ["conv2d", "lnear", "other"])


def entry(**fields: object) -> str:
    return json.dumps({"schema": 1, "ranges": {"x": fields}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "a range table is"),
        ('{"schema": 1}', "a range table is"),
        ('{"schema": 1, "ranges": []}', "a range table is"),
        ('{"schema": 2, "ranges": {}}', "schema 2; this version reads 1"),
        ('{"ranges": {}}', "schema None"),
        ('{"schema": true, "ranges": {}}', "schema True"),
        ('{"schema": 1, "ranges": {"x": 3}}', 'entry "x": needs "min" and "max"'),
        (entry(min=0), 'needs "min" and "max"'),
        (entry(min=0, max=1, mean=2), 'needs "min" and "max"'),
        (entry(min="0", max=1), "must be numbers"),
        (entry(min=True, max=1), "must be numbers"),
        (entry(min=None, max=1), "must be numbers"),
        (entry(min=2, max=1), "min <= max"),
        ('{"schema": 1, "ranges": {"x": {"min": NaN, "max": 1}}}', "finite ends"),
        ('{"schema": 1, "ranges": {"x": {"min": 0, "max": Infinity}}}', "finite ends"),
        (entry(min=0, max=10**400), 'entry "x"'),
        (entry(min=0, max=1e39), "does not fit float32"),
        (entry(min=0, max=1, histogram=[]), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [1], "counts": []}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [BINS], "counts": [1]}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [-1], "counts": [1]}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [1], "counts": [0]}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [1], "counts": [1.5]}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [1], "counts": [2**63]}), "a histogram is"),
        (entry(min=0, max=1, histogram={"bins": [1, 1], "counts": [2, 3]}), "a histogram is"),
        ('{"schema": 1, "ranges": {"x": {"min": 0, "max": 1}, "x": {"min": 0, "max": 2}}}', "twice"),
    ],
)
def test_a_malformed_table_says_what_is_wrong_and_where(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        RangeTable.from_json(text)


@pytest.mark.parametrize("given", [{"a": ("0", "1")}, {"a": (1,)}, {1: (0, 1)}, {"a": None}, {"a": (True, 2)}])
def test_a_range_that_is_no_pair_of_numbers_is_refused(given: dict[Any, Any]) -> None:
    with pytest.raises(InputError, match=r"takes node name: \(min, max\)"):
        RangeTable.of(given)
