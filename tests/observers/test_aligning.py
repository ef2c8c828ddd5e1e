"""Where an operand is requantized at a join's edge, the second rounding is exact if the two scales are near."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantmark.observers.plan import Cell, Join, JoinInput, Plan
from quantmark.observers.qparams import INT8_AFFINE, QParams, Scheme
from quantmark.observers.ranges import UNBOUNDED, Bounds, Range
from quantmark.observers.resolution import Resolution, resolve
from quantmark.observers.rules import JoinOutcome, JoinRules

RELU, RELU6 = Bounds(0.0, None), Bounds(0.0, 6.0)


def plan(
    contract: Bounds = RELU, scheme: Scheme = INT8_AFFINE, *, unfold: bool = False, exclusive: bool = False
) -> Plan:
    """An activation that meets a signed tensor in a join."""
    unfolds = (JoinOutcome.UNFOLD,) if unfold else ()
    cells = {
        "act": Cell(name="act", where="act", scheme=scheme, contract=contract, may_unfold=True),
        "signed": Cell(name="signed", where="signed", scheme=scheme, contract=UNBOUNDED),
        "cat": Cell(name="cat", where="cat", scheme=scheme),
    }
    join = Join(
        where="cat",
        output="cat",
        inputs=(JoinInput(cell="act", exclusive=exclusive), JoinInput(cell="signed", exclusive=True)),
        may_float=False,
        rules=JoinRules(outcomes=(JoinOutcome.SHARED, *unfolds, JoinOutcome.REQUANTIZE)),
    )
    return Plan(cells=cells, joins=(join,))


def decided(high: float, low: float, contract: Bounds = RELU, scheme: Scheme = INT8_AFFINE) -> Resolution:
    ranges = {"act": Range(0.0, high), "signed": Range(low, 1.0), "cat": Range(low, max(high, 1.0))}
    return resolve(plan(contract, scheme), ranges)


def pair(found: Resolution) -> tuple[QParams, QParams]:
    act, cat = found.assignments["act"].qparams, found.assignments["cat"].qparams
    assert act is not None
    assert cat is not None
    return act, cat


def test_scales_that_are_near_become_one() -> None:
    act, cat = pair(decided(5.0, -0.5))
    assert act.scale == cat.scale == pytest.approx(5.5 / 255)
    assert (act.zero_point, cat.zero_point) == (-128, -105)
    assert "at the join's scale" in decided(5.0, -0.5).decisions[0].reason


def test_scales_that_are_far_apart_stay_their_own() -> None:
    act, cat = pair(decided(5.0, -5.0))
    assert act.scale == pytest.approx(5.0 / 255)
    assert cat.scale == pytest.approx(10.0 / 255)


def test_an_upper_bound_is_not_given_up() -> None:
    act, cat = pair(decided(6.0, -0.5, RELU6))
    assert act.scale == pytest.approx(6.0 / 255)
    assert act.honours(RELU6)
    assert cat.scale > act.scale


def test_a_join_that_was_cut_takes_the_operands_scale() -> None:
    found = resolve(plan(), {"act": Range(0.0, 5.0), "signed": Range(-0.1, 1.0), "cat": Range(-0.1, 4.5)})
    act, cat = pair(found)
    assert act.scale == cat.scale == pytest.approx(5.0 / 255)
    assert cat.covers(Range(-0.1, 4.5))


def test_what_the_user_unlinked_keeps_its_scale() -> None:
    ranges = {"act": Range(0.0, 5.0), "signed": Range(-0.5, 1.0), "cat": Range(-0.5, 5.0)}
    act, _ = pair(resolve(plan()._replace(apart=frozenset({"act"})), ranges))
    assert act.scale == pytest.approx(5.0 / 255)


@pytest.mark.parametrize("contract", [RELU, RELU6])
def test_an_activation_that_may_be_an_op_of_its_own_shares_where_scales_are_near(contract: Bounds) -> None:
    ranges = {"act": Range(0.0, 5.0), "signed": Range(-0.5, 1.0), "cat": Range(-0.5, 4.9)}
    found = resolve(plan(contract, unfold=True), ranges)
    act, cat = pair(found)
    assert act == cat
    assert act.covers(Range(-0.5, 5.0))
    (decision,) = found.decisions
    assert decision.outcome is JoinOutcome.UNFOLD
    assert decision.reason == "act shares, its activation an op of its own"
    assert not decision.finding


def test_an_activation_with_other_readers_is_requantized_where_sharing_would_cost_more_than_rounding_twice() -> None:
    ranges = {"act": Range(0.0, 5.0), "signed": Range(-5.0, 1.0), "cat": Range(-5.0, 5.0)}
    found = resolve(plan(unfold=True), ranges)
    act, cat = pair(found)
    assert [act.scale, cat.scale] == pytest.approx([5.0 / 255, 10.0 / 255])
    assert found.decisions[0].outcome is JoinOutcome.REQUANTIZE
    assert act.honours(RELU)


def test_an_activation_that_only_the_join_reads_always_shares() -> None:
    ranges = {"act": Range(0.0, 1.0), "signed": Range(-50.0, 1.0), "cat": Range(-50.0, 1.0)}
    act, cat = pair(resolve(plan(unfold=True, exclusive=True), ranges))
    assert act == cat
    apart = plan(unfold=True, exclusive=True)._replace(apart=frozenset({"act"}))
    act, cat = pair(resolve(apart, ranges))
    assert act.honours(RELU)
    assert act != cat


@pytest.mark.parametrize(("end", "outcome"), [(700.0, JoinOutcome.UNFOLD), (900.0, JoinOutcome.REQUANTIZE)])
def test_an_activation_that_would_be_left_less_than_a_step_stays_folded(end: float, outcome: JoinOutcome) -> None:
    ranges = {"act": Range(0.0, 6.0), "signed": Range(-end, end), "cat": Range(-end, end)}  # 6 is 1.1 or 0.85 steps
    found = resolve(plan(RELU6, unfold=True, exclusive=True), ranges)
    act, _ = pair(found)
    assert found.decisions[0].outcome is outcome
    assert act.honours(RELU6) is (outcome is JoinOutcome.REQUANTIZE)


def test_what_may_not_be_an_op_of_its_own_keeps_its_contract() -> None:
    one = plan(unfold=True, exclusive=True)
    kept = one._replace(cells={name: cell._replace(may_unfold=False) for name, cell in one.cells.items()})
    act, _ = pair(resolve(kept, {"act": Range(0.0, 1.0), "signed": Range(-9.0, 1.0), "cat": Range(-9.0, 1.0)}))
    assert act.honours(RELU)


@given(high=st.floats(0.5, 100.0), low=st.floats(-50.0, -0.01))
def test_aligned_or_not_the_contract_holds_and_all_is_covered(high: float, low: float) -> None:
    act, cat = pair(decided(high, low))
    assert act.honours(RELU)
    assert act.covers(Range(0.0, high))
    assert cat.covers(Range(low, max(high, 1.0)))
    ratio = max(act.scale, cat.scale) / min(act.scale, cat.scale)
    assert ratio == 1.0 or ratio > 1.25
    if ratio == 1.0:  # every code of the activation is a value of the join, but for those beyond its end
        codes = torch.arange(-128, 128)
        values = (codes - act.zero_point) * act.scale
        again = torch.clamp(torch.round(values / cat.scale) + cat.zero_point, -128, 127)
        kept = values <= cat.representable.max
        assert torch.equal(((again - cat.zero_point) * cat.scale)[kept], values[kept])
