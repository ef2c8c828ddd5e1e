"""Ranges first: measured tables, and the roads from a table to qparams agree with one pass bit for bit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from quantmark.annotators.measure import fill_ranges, observe_ranges
from quantmark.observers.errors import InputError, MissingRangeError, NonFiniteError
from quantmark.observers.ranges import Range
from quantmark.observers.table import RangeTable
from support.roads import (
    CASES,
    Batches,
    Packed,
    Residual,
    filled,
    measured,
    one_pass,
    prepare,
    qparams,
    ranges_first,
    same,
    with_estimator,
)

Estimator = Literal["minmax", "histogram"]


@dataclass(frozen=True)
class Exported:
    program: torch.export.ExportedProgram
    batches: Batches


@functools.cache
def exported(name: str) -> Exported:
    batches = CASES[name].batches()
    return Exported(torch.export.export(CASES[name].model(), batches[0]), batches)


def test_a_table_of_another_model_is_refused() -> None:
    case = exported("independent")
    table = observe_ranges(case.program, case.batches, estimator="minmax")
    stale = RangeTable({**table.entries, "conv2d_77": next(iter(table.entries.values()))})
    with pytest.raises(MissingRangeError, match=r"names 1 node\(s\) that the graph lacks: 'conv2d_77'"):
        fill_ranges(prepare(case.program, CASES["independent"].config), stale)


@pytest.mark.parametrize("estimator", ["minmax", "histogram"])
@pytest.mark.parametrize("name", list(CASES))
def test_all_roads_lead_to_the_same_qparams(name: str, estimator: Estimator) -> None:
    case, config = exported(name), with_estimator(CASES[name].config, estimator)
    wanted = one_pass(case.program, config, case.batches)
    table = measured(case.program, case.batches, estimator)
    assert same(wanted, ranges_first(case.program, config, table), case.batches)
    assert same(wanted, filled(case.program, config, table), case.batches)
    assert qparams(wanted) == qparams(filled(case.program, config, table))


@pytest.mark.parametrize("estimator", ["minmax", "histogram"])
@pytest.mark.parametrize("name", ["independent", "residual"])
def test_shards_measured_apart_are_one_run(name: str, estimator: Estimator) -> None:
    case = exported(name)
    once = observe_ranges(case.program, case.batches, estimator=estimator)
    first, *others = [observe_ranges(case.program, [batch], estimator=estimator) for batch in case.batches]
    assert first.merge(*others) == once
    assert RangeTable.from_json(first.merge(*others[::-1]).to_json()) == once
    assert (once["x"].histogram is not None) is (estimator == "histogram")
    if once["x"].histogram is not None:
        assert sum(once["x"].histogram.values()) == sum(batch[0].numel() for batch in case.batches)


def test_every_float_tensor_is_measured_exactly() -> None:
    case = exported("residual")
    table = observe_ranges(case.program, case.batches)
    x = torch.cat([batch[0] for batch in case.batches])
    assert table["x"].range == Range(x.min().item(), x.max().item())
    assert {"relu", "max_pool2d", "conv2d_1", "conv2d_2", "sigmoid", "mean", "add", "linear"} <= set(table)
    assert "batch_norm" not in table  # folded, as it will be
    with torch.no_grad():
        output = torch.cat([CASES["residual"].model()(batch[0]) for batch in case.batches])
    assert table["sigmoid"].range.max == pytest.approx(output.max().item(), rel=1e-6)


def test_the_model_is_left_untouched() -> None:
    model = CASES["residual"].model()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = CASES["residual"].batches()
    graph = torch.export.export(model, batches[0]).module()
    assert isinstance(graph, torch.fx.GraphModule)
    before = [(node.name, node.target) for node in graph.graph.nodes]
    observe_ranges(graph, batches)
    assert [(node.name, node.target) for node in graph.graph.nodes] == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_batch_may_be_a_tensor_or_a_sequence() -> None:
    case = exported("alike")
    ways: list[list[Any]] = [[batch[0] for batch in case.batches], [list(b) for b in case.batches], case.batches]
    tables = [observe_ranges(case.program, batches, estimator="minmax") for batches in ways]
    assert tables[0] == tables[1] == tables[2]


def test_no_batches_or_a_nan_is_an_error_that_says_so() -> None:
    case = exported("alike")
    with pytest.raises(InputError, match="no batches"):
        observe_ranges(case.program, [])
    bad = case.batches[0][0].clone()
    bad[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"x \(placeholder\): 1 batch"):
        observe_ranges(case.program, [*case.batches, (bad,)])


def test_what_no_batch_reached_has_no_entry() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x[x.shape[0] :]).sum() + x.sum()

    table = observe_ranges(torch.export.export(Sometimes(), (torch.randn(3),)), [torch.randn(3)])
    assert "x" in table
    assert "relu" not in table


def test_a_prepared_model_is_filled_without_a_batch() -> None:
    case, config = exported("independent"), CASES["independent"].config
    table = observe_ranges(case.program, case.batches, estimator="minmax")
    prepared = prepare(case.program, config)
    assert fill_ranges(prepared, table) > 5
    assert fill_ranges(prepared, table) > 5  # again: instead of what was there


def test_filling_names_all_that_the_table_lacks() -> None:
    case = exported("independent")
    table = observe_ranges(case.program, case.batches, estimator="minmax")
    short = RangeTable({name: entry for name, entry in table.entries.items() if name not in {"slice_2", "cat"}})
    with pytest.raises(MissingRangeError, match=r"lacks 2 node\(s\).*'slice_2' \(nearest: slice_") as raised:
        fill_ranges(prepare(case.program, CASES["independent"].config), short)
    assert "'cat'" in str(raised.value)


def test_a_table_without_histograms_fills_histogram_estimators() -> None:
    case, config = exported("independent"), with_estimator(CASES["independent"].config, "histogram")
    table = observe_ranges(case.program, case.batches, estimator="minmax")
    wanted = one_pass(case.program, with_estimator(config, "minmax"), case.batches)
    assert same(wanted, filled(case.program, config, table), case.batches)
    assert same(wanted, ranges_first(case.program, config, table), case.batches)


def test_strict_export_is_measured_alike() -> None:
    batches = CASES["alike"].batches()
    model = CASES["alike"].model()
    tables = [
        observe_ranges(torch.export.export(model, batches[0], strict=strict), batches) for strict in (False, True)
    ]
    assert {n: e.range for n, e in tables[0].entries.items()} == {n: e.range for n, e in tables[1].entries.items()}


def test_half_precision_is_measured() -> None:
    torch.manual_seed(0)
    model = Packed().eval().to(torch.bfloat16)
    batch = torch.randn(8, 16, dtype=torch.bfloat16)
    table = observe_ranges(torch.export.export(model, (batch,)), [batch])
    assert table["x"].range == Range(batch.min().item(), batch.max().item())


def test_a_batch_norm_in_training_mode_is_not_changed_by_measuring() -> None:
    model = Residual()
    batches = CASES["residual"].batches()
    before = model.stem[1].running_mean.clone()  # type: ignore[operator]
    observe_ranges(torch.export.export(model.eval(), batches[0]), batches)
    assert torch.equal(model.stem[1].running_mean, before)  # type: ignore[arg-type]
