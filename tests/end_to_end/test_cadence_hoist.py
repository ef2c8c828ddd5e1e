"""Branch families under Cadence's hoist: executorch's pass and a double of the repaired one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from quantmark import BackendQuantizer, configs
from quantmark.annotators.measure import observe_ranges
from quantmark.observers.ranges import Range
from quantmark.observers.rules import Conflict, HoistRule, Outcome
from quantmark.observers.table import Entry, RangeTable
from support.flow import Flow, calls, is_dequantize, quantize, sqnr_db
from support.hoist import (
    CUTS,
    REORDERING,
    UNHOISTED,
    HoistAlways,
    HoistIdentical,
    Lowered,
    Towers,
    identical,
    loss_db,
    lower,
    scenario,
    scenarios,
    transformed,
)

ROWS = 512
EVERY_CUT = [(cut, index % 2 == 1) for index, cut in enumerate(CUTS)] + [("slice", True), ("select", False)]
SIMILAR = ["similar"]
DIFFERENT = [name for name in scenarios() if name not in SIMILAR]


@dataclass
class Case:
    """A model of packed inputs, the float outputs, and which outputs belong to which input."""

    model: Towers
    ranges: list[Range]
    inputs: tuple[Tensor, ...]
    reference: list[Tensor]

    def of(self, index: int) -> slice:
        return slice(index * len(self.ranges), (index + 1) * len(self.ranges))

    def sqnr(self, outputs: Sequence[Tensor]) -> list[float]:
        return [sqnr_db(a, b) for a, b in zip(self.reference, outputs, strict=True)]


@cache
def case(name: str, kinds: tuple[tuple[str, bool], ...]) -> Case:
    ranges = scenario(name)
    model = Towers(kinds, ranges).eval()
    inputs = model.inputs(ranges, ROWS)
    with torch.no_grad():
        return Case(model, ranges, inputs, model(*inputs))


def cadence(**options: object) -> configs.BackendConfig:
    return configs.cadence(estimator="minmax", **options)  # type: ignore[arg-type]


def kinds_for(name: str) -> tuple[tuple[str, bool], ...]:
    """The seed is cut in many ways, the other scenarios in one."""
    if name == "seed":
        return (
            *(("slice", False), ("slice", True), ("select", False), ("nested", True)),
            *(("views", False), ("tensor_split", True), ("split", False)),
        )
    return (("narrow", len(name) % 2 == 0),)


@cache
def optimum(name: str, kinds: tuple[tuple[str, bool], ...]) -> list[float]:
    """Each branch's SQNR where nothing is shared and nothing hoisted."""
    found = case(name, kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.NEVER, max_sharing_loss_db=0.0))
    with torch.no_grad():
        return found.sqnr(flow.converted(*found.inputs))


def qparams_below(lowered: Lowered, index: int) -> set[tuple[object, ...]]:
    return {node.args[1:] for node in lowered.below(lowered.root(index))}


# -- similar ranges: shared, and the hoist is free ---------------------------------------------------------------


@cache
def similar() -> tuple[Case, Lowered]:
    found = case("similar", tuple(EVERY_CUT))
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.IDENTICAL))
    return found, lower(flow.converted, found.inputs)


@pytest.mark.parametrize("hoist_pass", [HoistIdentical, HoistAlways], ids=["identical", "always"])
def test_similar_branches_share_and_the_hoist_is_bit_exact(hoist_pass: type) -> None:
    """One quantize is left above the root; split and chunk, which the pass does not look through, are left alone."""
    found, before = similar()
    after = transformed(before.edge, found.inputs, hoist_pass)
    assert identical(before.outputs, after.outputs)
    for index, (cut, _) in enumerate(EVERY_CUT):
        assert len(qparams_below(before, index)) == 1, cut
        assert after.hoisted(index) is (cut not in UNHOISTED), cut
    hoisted = sum(cut not in UNHOISTED for cut, _ in EVERY_CUT)
    branches = len(found.ranges)
    gone = len(before.effective_quantizes()) - len(after.effective_quantizes())
    assert gone == hoisted * (branches - 1), "one quantize takes the place of each root's"


def test_similar_branches_lose_nothing_by_sharing() -> None:
    found, before = similar()
    own = optimum("similar", tuple(EVERY_CUT))
    assert all(loss_db(a, b) <= 0.5 for a, b in zip(own, found.sqnr(before.outputs), strict=True))


def test_without_sharing_the_same_ranges_would_not_be_hoisted() -> None:
    """What the library is for: alike ranges give all but equal qparams, and the repaired pass wants equal ones."""
    kinds = (("slice", False),)
    found = case("similar", kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.NEVER, max_sharing_loss_db=0.0))
    before = lower(flow.converted, found.inputs)
    assert len(qparams_below(before, 0)) == len(found.ranges)
    assert not transformed(before.edge, found.inputs, HoistIdentical).hoisted(0)
    after = transformed(before.edge, found.inputs, HoistAlways)
    assert after.hoisted(0)
    assert not identical(before.outputs, after.outputs)


# -- different ranges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_branches_stay_apart_under_the_repaired_rule(name: str) -> None:
    kinds = kinds_for(name)
    found, own = case(name, kinds), optimum(name, kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.IDENTICAL))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, HoistIdentical)
    assert identical(before.outputs, after.outputs)
    for index in range(len(kinds)):
        assert len(qparams_below(before, index)) > 1
        assert not after.hoisted(index)
    assert all(loss_db(a, b) <= 0.5 for a, b in zip(own, found.sqnr(before.outputs), strict=True))


@pytest.mark.parametrize("name", DIFFERENT)
def test_conflict_float_keeps_every_branch_under_the_real_pass(name: str) -> None:
    """At most one branch of a family stays float, so that the pass does not fire; it is the better for it."""
    kinds = kinds_for(name)
    found, own = case(name, kinds), optimum(name, kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.ALWAYS, conflict=Conflict.FLOAT))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, HoistAlways)
    assert identical(before.outputs, after.outputs)
    assert all(loss_db(a, b) <= 0.5 for a, b in zip(own, found.sqnr(after.outputs), strict=True))
    for index, (cut, _) in enumerate(kinds):
        quantized = len(before.below(before.root(index)))
        assert quantized == len(found.ranges) - (cut not in UNHOISTED), cut


@pytest.mark.parametrize("name", DIFFERENT)
def test_conflict_union_clips_nothing_under_the_real_pass(name: str) -> None:
    kinds = kinds_for(name)
    found, own = case(name, kinds), optimum(name, kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.ALWAYS, conflict=Conflict.UNION))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, HoistAlways)
    assert identical(before.outputs, after.outputs)
    lost = [loss_db(a, b) for a, b in zip(own, found.sqnr(after.outputs), strict=True)]
    decisions = quantizer(flow).record.decisions  # one for each root, in graph order
    for index, ((cut, _), decision) in enumerate(zip(kinds, decisions, strict=True)):
        if cut in UNHOISTED:
            continue
        ((scale, zero_point, low, high, _),) = qparams_below(before, index)
        covering = found.ranges[0].union(*found.ranges[1:])
        assert scale * (low - zero_point) <= covering.min + scale / 2  # type: ignore[operator]
        assert scale * (high - zero_point) >= covering.max - scale / 2  # type: ignore[operator]
        assert decision.finding
        assert decision.outcome is Outcome.INDEPENDENT
        assert max(lost[found.of(index)]) <= decision.worst_loss_db + 1.0, "no branch loses more than was said"


# -- both roads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenarios())
def test_both_roads_give_the_same_qparams(name: str) -> None:
    """Decided at annotation time from the fixture's ranges, or in convert_pt2e from what the observers saw."""
    kinds = tuple((cut, False) for cut in (list(CUTS) if name in {"similar", "seed"} else ["slice"]))
    found = case(name, kinds)
    config = cadence(hoist=HoistRule.ALWAYS)
    one_pass = quantize(found.model, found.inputs, config).converted
    exported = torch.export.export(found.model, found.inputs)
    measured = observe_ranges(exported, [found.inputs], estimator="minmax")
    table = RangeTable({**measured.entries, **written_by_hand(exported.module(), found, measured)})
    ranges_first = quantize(found.model, found.inputs, BackendQuantizer(config, ranges=table), batches=[]).converted
    assert code(ranges_first) == code(one_pass)


def written_by_hand(graph: torch.nn.Module, found: Case, measured: RangeTable) -> dict[str, Entry]:
    """The fixture's entries under the node names of the branches, which stand before the ops that read them."""
    assert isinstance(graph, torch.fx.GraphModule)
    readers = [n for n in graph.graph.nodes if "aten.linear" in str(n.target)]
    entries = {n.args[0].name: Entry(found.ranges[i % len(found.ranges)]) for i, n in enumerate(readers)}
    assert all(measured[name].range == entry.range for name, entry in entries.items()), (
        "the data are as the fixture says"
    )
    return entries


def code(graph: torch.fx.GraphModule) -> list[tuple[str, tuple[object, ...]]]:
    """Every node's op with its plain arguments: qparams, sizes."""
    return [
        (str(n.target), tuple(a for a in n.args if isinstance(a, (int, float))))
        for n in graph.graph.nodes
        if n.op != "get_attr"
    ]


# -- the whole list of reordering passes, exports, schemes, options -------------------------------------------


@pytest.mark.parametrize("conflict", Conflict)
@pytest.mark.parametrize("name", ["similar", "seed"])
def test_all_of_cadences_reordering_is_bit_exact(name: str, conflict: Conflict) -> None:
    kinds = ("slice", False), ("select", True), ("nested", False)
    found = case(name, kinds)
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.ALWAYS, conflict=conflict))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, *REORDERING)
    assert identical(before.outputs, after.outputs)
    shared = name == "similar" or conflict is Conflict.UNION
    assert [after.hoisted(index) for index in range(len(kinds))] == [shared] * len(kinds)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["similar", "seed"])
def test_strict_and_default_export(name: str, strict: bool) -> None:
    found = case(name, (("slice", False),))
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.ALWAYS), strict=strict)
    (decision,) = quantizer(flow).record.decisions
    assert decision.outcome is (Outcome.SHARED if name == "similar" else Outcome.INDEPENDENT)
    linears = calls(flow.converted, "linear")
    assert len(linears) == len(found.ranges)
    assert sum(is_dequantize(linear.args[0]) for linear in linears) == len(linears) - (name != "similar")


@pytest.mark.parametrize("name", ["similar", "seed"])
def test_int16_activations(name: str) -> None:
    found = case(name, (("slice", True),))
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.ALWAYS, activation="int16"))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, HoistAlways)
    assert identical(before.outputs, after.outputs)
    assert after.hoisted(0) is (name == "similar")
    assert {args[-1] for args in qparams_below(before, 0)} == {torch.int16}
    assert min(found.sqnr(after.outputs)) > 40.0, "8-bit weights are what is left"


def test_one_that_differs_undoes_the_group_without_partial_groups() -> None:
    found = case("seed", (("slice", False),))
    config = cadence(hoist=HoistRule.IDENTICAL)
    config = replace(config, branches=replace(config.branches, partial_groups=False))
    before = lower(quantize(found.model, found.inputs, config).converted, found.inputs)
    assert len(qparams_below(before, 0)) == len(found.ranges)
    assert not transformed(before.edge, found.inputs, HoistIdentical).hoisted(0)


def test_the_pass_that_hoists_always_spoils_what_differs() -> None:
    """That the tests above show anything: without quantmark's doing the third branch of the seed is lost."""
    found = case("seed", (("slice", False),))
    flow = quantize(found.model, found.inputs, cadence(hoist=HoistRule.NEVER))
    before = lower(flow.converted, found.inputs)
    after = transformed(before.edge, found.inputs, HoistAlways)
    assert min(found.sqnr(before.outputs)) > 35.0
    assert found.sqnr(after.outputs)[2] < 3.0


def quantizer(flow: Flow) -> BackendQuantizer:
    assert isinstance(flow.quantizer, BackendQuantizer)
    return flow.quantizer
