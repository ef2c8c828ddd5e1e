"""Ranges first: every outcome can be read on the annotated graph, and nothing is left to calibrate or decide."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationSpec, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from quantmark.annotators.measure import observe_ranges
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.observers.errors import MissingRangeError
from quantmark.observers.ranges import Range
from quantmark.observers.rules import Outcome
from quantmark.observers.table import Entry, RangeTable
from support.flow import is_dequantize, pair_of, sqnr_db
from support.roads import CASES, calibrate, qparams, with_estimator


@functools.cache
def exported(name: str) -> tuple[torch.export.ExportedProgram, RangeTable]:
    batches = CASES[name].batches()
    program = torch.export.export(CASES[name].model(), batches[0])
    return program, observe_ranges(program, batches, estimator="minmax")


def annotated(name: str, table: RangeTable | None = None) -> tuple[GraphModule, BackendQuantizer]:
    program, measured = exported(name)
    quantizer = BackendQuantizer(with_estimator(CASES[name].config, "minmax"), ranges=table or measured)
    graph = program.module()
    assert isinstance(graph, GraphModule)
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    return graph, quantizer


def node(graph: GraphModule, name: str) -> Node:
    (found,) = [n for n in graph.graph.nodes if n.name == name]
    assert isinstance(found, Node)
    return found


def spec(graph: GraphModule, name: str, reader: str | None = None) -> QuantizationSpec | None:
    """The concrete spec of a node's output or, with `reader`, of the edge to a reader."""
    value = node(graph, name)
    annotation = (node(graph, reader) if reader else value).meta.get(Q_ANNOTATION_KEY)
    found = None if annotation is None else annotation.input_qspec_map.get(value) if reader else annotation.output_qspec
    while isinstance(found, SharedQuantizationSpec):
        place = found.edge_or_node
        held = (place[1] if isinstance(place, tuple) else place).meta[Q_ANNOTATION_KEY]
        found = held.input_qspec_map[place[0]] if isinstance(place, tuple) else held.output_qspec
    assert found is None or isinstance(found, QuantizationSpec)
    return found


def dtype(graph: GraphModule, name: str, reader: str | None = None) -> torch.dtype | None:
    found = spec(graph, name, reader)
    return found.dtype if found else None


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_is_left_to_decide(name: str) -> None:
    _, quantizer = annotated(name)
    for component in quantizer.record.components:
        assert not component.plan.families
        assert not component.plan.joins
        assert not component.plan.hoists


@pytest.mark.parametrize("name", list(CASES))
def test_the_decisions_are_those_of_one_pass(name: str) -> None:
    program, _ = exported(name)
    quantizer = BackendQuantizer(with_estimator(CASES[name].config, "minmax"))
    calibrate(prepare_pt2e(program.module(), quantizer), CASES[name].batches())
    _, settled = annotated(name)

    def told(each: BackendQuantizer) -> list[Any]:
        return sorted((d.kind, d.where, d.outcome.name, sorted(d.groups), d.reason) for d in each.record.decisions)

    assert told(settled) == told(quantizer)
    assert settled.record.settled == settled.record.decisions


def outcomes(name: str) -> list[Enum]:
    return [decision.outcome for decision in annotated(name)[1].record.decisions]


def test_shared_branches_are_one_spec() -> None:
    assert outcomes("alike")[0] is Outcome.SHARED
    graph, _ = annotated("alike")
    entries = [spec(graph, f"slice_{i}", f"linear{f'_{i - 1}' if i > 1 else ''}") for i in range(1, 5)]
    assert all(each is entries[0] for each in entries)
    assert entries[0] is not None
    assert spec(graph, "x", "slice_1") is entries[0]


def test_independent_branches_leave_the_root_float() -> None:
    assert outcomes("independent")[0] is Outcome.INDEPENDENT
    graph, _ = annotated("independent")
    assert spec(graph, "x", "slice_1") is None
    entries = [spec(graph, f"slice_{i}", f"linear{f'_{i - 1}' if i > 1 else ''}") for i in range(1, 5)]
    assert entries[0] is entries[1] is entries[3]
    assert entries[2] is not entries[0]
    assert entries[2] is not None


def test_a_wide_root_is_int16_up_to_its_readers() -> None:
    assert outcomes("wide root")[0] is Outcome.WIDE_ROOT
    graph, _ = annotated("wide root")
    assert dtype(graph, "conv2d") is torch.int16
    assert dtype(graph, "getitem") is torch.int16
    assert dtype(graph, "getitem", "conv2d_2") is torch.int8
    assert dtype(graph, "getitem_1", "conv2d_3") is torch.int8


def test_a_float_root_has_no_spec_and_neither_has_its_weight() -> None:
    assert outcomes("float root")[0] is Outcome.FLOAT_ROOT
    graph, _ = annotated("float root")
    assert spec(graph, "conv2d") is None
    assert spec(graph, "producer_weight", "conv2d") is None
    assert dtype(graph, "getitem", "conv2d_2") is torch.int8
    assert dtype(graph, "x", "conv2d") is torch.int8  # its other reader is quantized; the conv reads what that reads


def test_a_conflict_leaves_one_op_float() -> None:
    graph, quantizer = annotated("cadence float")
    floats = [i for i in range(1, 5) if spec(graph, f"slice_{i}", f"linear{f'_{i - 1}' if i > 1 else ''}") is None]
    assert floats == [3]
    assert quantizer.record.settled[0].notes
    assert spec(graph, "towers_2_0_weight", "linear_2") is None


def test_a_prepared_model_converts_without_a_batch_and_batches_change_nothing() -> None:
    program, table = exported("independent")
    quantizer = BackendQuantizer(CASES["independent"].config, ranges=table)
    prepared = prepare_pt2e(program.module(), quantizer)
    again = calibrate(prepare_pt2e(program.module(), quantizer), [(torch.full((8, 16), 1e4),)])
    assert qparams(convert_pt2e(prepared)) == qparams(convert_pt2e(again))


def test_ranges_from_a_data_sheet_are_taken_at_their_word() -> None:
    _, table = exported("alike")
    by_hand = RangeTable.of({name: entry.range for name, entry in table.entries.items()} | {"x": (-8.0, 7.9375)})
    by_hand = by_hand.merge(RangeTable.of({f"slice_{i}": (-8.0, 7.9375) for i in range(1, 5)}))
    program, _ = exported("alike")
    prepared = prepare_pt2e(program.module(), BackendQuantizer(CASES["alike"].config, ranges=by_hand))
    converted = convert_pt2e(prepared)
    first = next(n for n in converted.graph.nodes if str(n.target) == "aten.linear.default").args[0]
    assert isinstance(first, Node)
    assert is_dequantize(first)
    assert (pair_of(first).scale, pair_of(first).zero_point) == (0.0625, 0)


def test_a_table_that_lacks_a_tensor_or_names_an_unknown_one_is_refused() -> None:
    _, table = exported("independent")
    short = RangeTable({name: entry for name, entry in table.entries.items() if name != "slice_2"})
    with pytest.raises(MissingRangeError, match=r"lacks 1 node.*'slice_2' \(nearest: slice_"):
        annotated("independent", short)
    wrong = RangeTable({**table.entries, "slise_9": Entry(Range(0.0, 1.0))})
    with pytest.raises(MissingRangeError, match=r"names 1 node.*'slise_9' \(nearest: slice_"):
        annotated("independent", wrong)
    spare = RangeTable({name: entry for name, entry in table.entries.items() if name != "cat"})
    with pytest.raises(MissingRangeError, match="'cat'"):
        annotated("independent", spare)


def test_a_table_may_name_what_annotation_rewrites_away() -> None:
    class Clamps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x).clamp(min=0).clamp(max=3) * 2.0
            return y

    torch.manual_seed(0)
    batch = (torch.randn(8, 4),)
    model = Clamps()
    program = torch.export.export(model, batch)
    table = observe_ranges(program, [batch])
    prepared = prepare_pt2e(program.module(), BackendQuantizer(CASES["alike"].config, ranges=table))
    assert sqnr_db(model(*batch), convert_pt2e(prepared)(*batch)) > 30
