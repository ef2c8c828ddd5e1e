"""Branches below one tensor, under either hoist rule; what the real pass does stands in tests/end_to_end."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from quantmark import configs
from quantmark.checks import Finding, Severity, check
from quantmark.observers.rules import HoistRule
from support.flow import pair_of, quantize
from support.planting import quantize_after, set_qparams, the

ALWAYS = configs.cadence(hoist=HoistRule.ALWAYS, estimator="minmax")
IDENTICAL = configs.cadence(hoist=HoistRule.IDENTICAL, estimator="minmax")
X = (torch.linspace(-1.0, 1.0, 8)[:, None].expand(8, 16).contiguous(),)  # every part has the same range


class Towers(nn.Module):
    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))

    def forward(self, x: Tensor) -> Any:
        return sum(tower(x[:, 4 * i : 4 * i + 4]) for i, tower in enumerate(self.towers))


@cache
def _converted(parts: int = 4) -> GraphModule:
    return quantize(Towers(parts).eval(), X, IDENTICAL).converted


def planted(*branches: tuple[float, int], parts: int = 4) -> GraphModule:
    """The towers with these (scale, zero point) below the slices."""
    graph = copy.deepcopy(_converted(parts))
    for index in range(parts):
        scale, zero_point = branches[index % len(branches)]
        set_qparams(quantize_after(the(graph, "slice", index)), scale=scale, zero_point=zero_point)
    return graph


def hoists(graph: GraphModule, config: configs.BackendConfig) -> list[Finding]:
    return [f for f in check(graph, config).findings if f.code[2] == "7"]


def test_the_quantizer_shares_so_that_the_hoist_is_free() -> None:
    graph = _converted()
    quantizes = {pair_of(quantize_after(the(graph, "slice", i))) for i in range(4)}
    assert len(quantizes) == 1
    assert hoists(graph, ALWAYS) == hoists(graph, IDENTICAL) == []


def test_a_wide_representative_coarsens_the_narrow_branches() -> None:
    """Measured on the real pass with these qparams: 40, 45, 1.0 dB (the wide one saturates), exact."""
    (found,) = hoists(planted((0.021, -3), (0.021, -4), (0.5, -10), (0.021, -1)), ALWAYS)
    assert (found.code, found.node, found.severity) == ("QM701", "x", Severity.ERROR)
    assert found.numbers["scale"] == 0.021
    assert found.numbers["zero_point"] == -1.0
    assert found.numbers["clipped"] == 3.0
    assert found.numbers["loss_db"] > 45


def test_a_narrow_branch_passes_wide_steps() -> None:
    (found,) = hoists(planted((0.02, -3), (0.5, 10)), ALWAYS)
    assert found.numbers["scale"] == 0.5
    assert found.numbers["clipped"] == 0.0
    assert found.numbers["loss_db"] == pytest.approx(27.97, abs=0.05)


def test_without_a_config_and_without_a_hoist_nothing_is_said() -> None:
    graph = planted((0.02, -3), (0.5, 10))
    assert not {"QM701", "QM702"} & set(check(graph).codes())
    never = replace(ALWAYS, branches=replace(ALWAYS.branches, hoist=HoistRule.NEVER))
    assert hoists(graph, never) == []
    assert hoists(graph, IDENTICAL) == []


def test_a_miss_by_a_hair() -> None:
    """Branches of the same true range, as peers observe them: -33 and -34, .01058 and .01056."""
    (found,) = hoists(planted((0.01058, -33), (0.01056, -34)), IDENTICAL)
    assert (found.code, found.severity) == ("QM702", Severity.INFO)
    assert found.numbers["loss_db"] == pytest.approx(0.05, abs=0.03)


def test_a_part_that_is_too_small_is_not_hoisted() -> None:
    """Slices that read less than half of the tensor are not worth it for the pass."""
    graph = planted((0.02, -3), (0.5, 10))
    for index in (3, 2, 1):  # leaves one slice of a quarter, and the same again
        slice_ = the(graph, "slice", index)
        quantize = quantize_after(slice_)
        quantize.replace_input_with(slice_, the(graph, "slice", 0))
        graph.graph.erase_node(slice_)
    assert hoists(graph, ALWAYS) == []
    willing = replace(ALWAYS, branches=replace(ALWAYS.branches, min_coverage=0.25))
    assert len(hoists(graph, willing)) == 1


def test_a_float_reader_anywhere_stops_the_hoist() -> None:
    graph = planted((0.02, -3), (0.5, 10))
    slice_ = the(graph, "slice")
    with graph.graph.inserting_after(slice_):
        graph.graph.call_function(torch.ops.aten.sigmoid.default, (slice_,))
    assert hoists(graph, ALWAYS) == []
