"""The laws of a resolution on plans drawn at random, and each outcome on a plan made for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmark.observers.clusters import own_scale
from quantmark.observers.plan import Cell, Leaf, Plan
from quantmark.observers.qparams import (
    INT8_AFFINE,
    INT8_SYMMETRIC,
    INT16_SYMMETRIC,
    QParams,
    choose_qparams,
    sharing_loss_db,
)
from quantmark.observers.ranges import Range
from quantmark.observers.resolution import Assignment, Resolution, resolve
from quantmark.observers.rules import BranchRules, Conflict, Decision, HoistRule, JoinOutcome, Outcome, TensorOutcome
from support.plans import RELU, RELU6, SIGMOID, cell, cells, family, hoist, join, plans, ranges, shuffled

DB = 1e-6
drawn = plans()


def quantized(found: Resolution) -> dict[str, tuple[Assignment, QParams]]:
    return {n: (a, a.qparams) for n, a in found.assignments.items() if a.qparams is not None}


def decision(found: Resolution, where: str) -> Decision:
    (wanted,) = [each for each in found.decisions if each.where.startswith(where)]
    return wanted


def sets(groups: tuple[tuple[str, ...], ...]) -> set[frozenset[str]]:
    return {frozenset(group) for group in groups}


# -- laws ---------------------------------------------------------------------------------------------------


@given(drawn)
def test_qparams_cover_their_range_and_honour_their_contract(
    case: tuple[Plan, dict[str, Range], dict[str, Range]],
) -> None:
    plan, seen, exact = case
    for name, (_, qparams) in quantized(resolve(plan, seen, exact)).items():
        if qparams == SIGMOID:
            continue  # the backend dictates it
        contract = plan.cells[name].contract
        assert qparams.covers(seen[name].clamp(contract)), name
        unfolds = plan.cells[name].may_unfold and any(JoinOutcome.UNFOLD in j.rules.outcomes for j in plan.joins)
        assert qparams.honours(contract) or unfolds, name
        if qparams.scheme.dtype is INT16_SYMMETRIC.dtype:
            assert qparams.covers(exact[name].clamp(contract)), name


@given(drawn)
def test_members_of_a_group_are_alike_and_it_is_named_after_one(
    case: tuple[Plan, dict[str, Range], dict[str, Range]],
) -> None:
    found = resolve(*case)
    for name, (assignment, qparams) in quantized(found).items():
        first = found.assignments[assignment.group]
        assert first.qparams == qparams, name
        assert first.group == assignment.group, name


@given(drawn, st.integers(0, 99))
def test_the_order_in_which_a_plan_lists_its_parts_does_not_matter(
    case: tuple[Plan, dict[str, Range], dict[str, Range]], seed: int
) -> None:
    plan, seen, exact = case
    one, other = resolve(plan, seen, exact), resolve(shuffled(plan, seed), seen, exact)
    assert one.assignments == other.assignments

    def told(found: Resolution) -> set[object]:
        return {
            (d.kind, d.where, d.outcome, frozenset(sets(d.groups)), frozenset(d.losses_db), d.reason, d.rejected)
            for d in found.decisions
        }

    assert told(one) == told(other)
    assert resolve(plan, seen, exact) == one


@given(drawn)
def test_a_root_that_stays_narrow_has_the_qparams_of_all_its_branches(
    case: tuple[Plan, dict[str, Range], dict[str, Range]],
) -> None:
    plan, seen, exact = case
    found = resolve(plan, seen, exact)
    for each in plan.families:
        root = found.assignments.get(each.root or "")
        if root is None or root.qparams is None:
            continue
        narrow = root.qparams.scheme.dtype is not INT16_SYMMETRIC.dtype
        for leaf in each.leaves:
            mine = found.assignments.get(leaf.cell)
            if mine is None or mine.qparams is None or leaf.cell == each.root:
                continue
            if narrow:
                assert mine.group == root.group or any(d.finding for d in found.decisions if d.where == each.where)
            elif mine.root == each.root:
                assert mine.through == root.qparams


@given(drawn)
def test_what_the_pass_would_hoist_is_alike(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    found = resolve(plan, seen, exact)
    for each in plan.hoists:
        met = [found.assignments.get(name) for name in each.costs]
        if each.rules.hoist is HoistRule.ALWAYS and all(a is not None for a in met):
            qparams = [a.through or a.qparams for a in met if a is not None]
            assert None in qparams or len(set(qparams)) == 1


@given(drawn)
def test_recorded_losses_are_those_of_the_result(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    found = resolve(plan, seen, exact)
    for each in found.decisions:
        for name, loss in each.losses_db:
            if each.outcome is JoinOutcome.FLOAT or seen[name] == Range(0.0, 0.0):
                assert loss == 0.0
                continue
            mine = found.assignments[name]
            if each.kind == "join":
                output = next(j.output for j in plan.joins if j.where == each.where)
                mine = found.assignments[output]
            if mine.qparams is None:
                continue  # a weight that follows: its op stays float
            through = mine.through.scale if mine.through and each.kind != "join" else 0.0
            own = own_scale(plan.cells[name], seen[name])
            group = [n for n, other in found.assignments.items() if other.group == mine.group]
            if any(plan.cells[n].headroom is not None for n in group):
                continue  # a loss is that of sharing alone: see the test of headroom below
            assert loss == pytest.approx(sharing_loss_db(own, mine.qparams.scale, through), abs=DB)


@given(drawn)
def test_each_outcome_not_taken_has_its_reason(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    rules = {each.where: each.rules for each in plan.families}
    for each in resolve(plan, seen, exact).decisions:
        assert each.reason
        names = [name for name, why in each.rejected if why]
        assert len(names) == len(each.rejected)
        if each.kind == "branches" and each.where in rules and names:
            legal = [outcome.name for outcome in rules[each.where].outcomes]
            assert each.outcome.name not in names
            assert set(names) <= set(legal)
            if not each.finding:  # everything before the one that was taken
                assert names == legal[: legal.index(each.outcome.name)]


@given(plans(related=False))
def test_families_keep_within_their_budget_or_say_so(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    found = resolve(plan, seen, exact)
    by_where = {each.where: each for each in plan.families}
    for each in found.decisions:
        mine = by_where[each.where]
        rooted = mine.root in found.assignments
        budget = mine.rules.max_root_loss_db if rooted else mine.rules.max_sharing_loss_db
        known = [leaf for leaf in mine.leaves if leaf.cell in found.assignments]
        if mine.root_is_float and all(leaf.read_in_float for leaf in known):
            budget = mine.rules.max_float_loss_db
        if each.outcome in {Outcome.INDEPENDENT, Outcome.FLOAT_ROOT}:
            budget = mine.rules.max_sharing_loss_db
        assert each.finding or each.worst_loss_db <= budget + 2 * DB


@given(drawn)
def test_what_follows_a_float_cell_is_float(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    found = resolve(plan, seen, exact).assignments
    decided = {name for name, a in found.items() if a.qparams is not None or not plan.cells[name].follows}
    for name in found:
        for source in plan.cells[name].follows & decided:
            if found[source].qparams is None:
                assert found[name].qparams is None
        if not plan.cells[name].follows <= found.keys():
            assert found[name].qparams is None


# -- branch families ----------------------------------------------------------------------------------------

ALL = (Outcome.SHARED, Outcome.INDEPENDENT, Outcome.SPLIT_PRODUCER, Outcome.WIDE_ROOT, Outcome.FLOAT_ROOT)


def rules(*outcomes: Outcome, **fields: Any) -> BranchRules:
    return BranchRules(outcomes=outcomes, **fields)


def test_alike_branches_of_a_float_root_share() -> None:
    plan = Plan(cells=cells("a", "b"), families=(family(None, "a", "b"),))
    found = resolve(plan, ranges(a=(-1.0, 1.7), b=(-1.02, 1.68)))
    assert decision(found, "None").outcome is Outcome.SHARED
    assert found.assignments["a"].qparams == found.assignments["b"].qparams
    assert found.assignments["a"].qparams == choose_qparams(Range(-1.02, 1.7), plan.cells["a"].scheme)
    assert "0.0" in decision(found, "None").reason


def test_alike_branches_have_the_least_headroom_among_them() -> None:
    roomy = replace(INT16_SYMMETRIC, headroom=2.0)
    plan = Plan(
        cells=cells(a=cell("a", roomy), b=cell("b", roomy, headroom=1.25), c=cell("c", roomy)),
        families=(family(None, "a", "b"),),
    )
    seen = ranges(a=1.0, b=1.02, c=1.0)
    found = resolve(plan, seen).assignments
    assert found["a"].qparams == found["b"].qparams == choose_qparams(Range(-1.02, 1.02), roomy, headroom=1.25)
    assert found["c"].qparams == choose_qparams(Range(-1.0, 1.0), roomy)
    assert dict(decision(resolve(plan, seen), "None").losses_db) == pytest.approx({"a": 0.172, "b": 0.0}, abs=1e-3)


def test_branches_that_differ_are_independent() -> None:
    plan = Plan(cells=cells("a", "b", "c"), families=(family(None, "a", "b", "c"),))
    found = resolve(plan, ranges(a=(-1.0, 1.7), b=(0.0, 100.0), c=(-1.0, 1.71)))
    mine = decision(found, "None")
    assert mine.outcome is Outcome.INDEPENDENT
    assert sets(mine.groups) == {frozenset("ac"), frozenset("b")}
    assert mine.rejected[0][0] == "SHARED"
    assert "dB, budget 0.5 dB" in mine.rejected[0][1]
    assert not mine.finding


def test_all_or_none_without_partial_groups() -> None:
    whole = rules(Outcome.SHARED, Outcome.INDEPENDENT, partial_groups=False)
    plan = Plan(cells=cells("a", "b", "c"), families=(family(None, "a", "b", "c", rules=whole),))
    found = resolve(plan, ranges(a=(-1.0, 1.7), b=(0.0, 100.0), c=(-1.0, 1.71)))
    assert len(decision(found, "None").groups) == 3


NARROW_AND_WIDE = ranges(r=62.0, narrow=1.0, wide=62.0)


def decide(*outcomes: Outcome, seen: dict[str, Range] = NARROW_AND_WIDE, r: Cell | None = None) -> Resolution:
    wide = INT16_SYMMETRIC if Outcome.WIDE_ROOT in outcomes else None
    each = family("r", "narrow", "wide", rules=rules(*outcomes), wide=wide)
    plan = Plan(cells=cells("r", "narrow", "wide", **({"r": r} if r else {})), families=(each,))
    return resolve(plan, seen)


def test_a_quantized_root_shares_where_that_costs_little() -> None:
    found = decide(*ALL, seen=ranges(r=1.5, narrow=1.0, wide=1.5))
    assert decision(found, "r").outcome is Outcome.SHARED
    assert len({a.qparams for a in found.assignments.values()}) == 1
    assert decision(found, "r").worst_loss_db == pytest.approx(20 * math.log10(1.5), abs=1e-3)


def test_a_wide_root() -> None:
    found = decide(*ALL)
    mine = decision(found, "r")
    assert mine.outcome is Outcome.WIDE_ROOT
    assert [name for name, _ in mine.rejected] == ["SHARED", "INDEPENDENT", "SPLIT_PRODUCER"]
    root = found.assignments["r"].qparams
    assert root == choose_qparams(Range(-62.0, 62.0), INT16_SYMMETRIC)
    for leaf in ("narrow", "wide"):
        assert found.assignments[leaf].through == root
        assert found.assignments[leaf].root == "r"
    own = 2 / 255
    assert dict(mine.losses_db)["narrow"] == pytest.approx(20 * math.log10(math.hypot(own, 62 / 32767) / own), abs=1e-3)


def test_a_wide_root_covers_what_an_estimator_cut_off() -> None:
    plan = Plan(cells=cells("r", "a", "b"), families=(family("r", "a", "b", rules=rules(*ALL), wide=INT16_SYMMETRIC),))
    found = resolve(plan, ranges(r=60.0, a=1.0, b=60.0), ranges(r=100.0, a=1.0, b=100.0))
    assert found.assignments["r"].qparams == choose_qparams(Range(-100.0, 100.0), INT16_SYMMETRIC)


def test_a_wide_root_whose_own_steps_would_be_too_coarse_is_not_taken() -> None:
    found = decide(*ALL, seen=ranges(r=1e4, narrow=1.0, wide=1e4))
    mine = decision(found, "r")
    assert mine.outcome is Outcome.FLOAT_ROOT
    assert dict(mine.rejected)["WIDE_ROOT"].startswith("costs narrow 31.")


def test_a_wide_root_keeps_the_contract_of_its_activation() -> None:
    found = decide(*ALL, r=cell("r", contract=RELU6), seen=ranges(r=(0.0, 6.0), narrow=(0.0, 0.1), wide=(0.0, 6.0)))
    root = found.assignments["r"].qparams
    assert decision(found, "r").outcome is Outcome.WIDE_ROOT
    assert root is not None
    assert root.honours(RELU6)
    assert (root.zero_point, root.scheme.quant_min, root.scheme.dtype) == (0, 0, INT16_SYMMETRIC.dtype)


def test_qparams_that_the_backend_dictates_are_not_widened() -> None:
    found = decide(*ALL, r=cell("r", fixed=SIGMOID), seen=ranges(r=(0.0, 1.0), narrow=(0.0, 0.01), wide=(0.0, 1.0)))
    assert decision(found, "r").outcome is Outcome.FLOAT_ROOT
    assert "no wide scheme" in dict(decision(found, "r").rejected)["WIDE_ROOT"]


def test_branches_of_dictated_qparams_take_them_although_they_reach_one() -> None:
    found = decide(*ALL, r=cell("r", fixed=SIGMOID), seen=ranges(r=(0.0, 1.0), narrow=(0.0, 0.9), wide=(0.0, 1.0)))
    assert decision(found, "r").outcome is Outcome.SHARED
    assert {a.qparams for a in found.assignments.values()} == {SIGMOID}


def test_a_float_root() -> None:
    found = decide(Outcome.SHARED, Outcome.INDEPENDENT, Outcome.FLOAT_ROOT)
    assert decision(found, "r").outcome is Outcome.FLOAT_ROOT
    assert found.assignments["r"].qparams is None
    assert found.assignments["narrow"].qparams == choose_qparams(Range(-1.0, 1.0), cell("x").scheme)


def test_where_nothing_is_within_budget_the_least_lossy_is_taken_and_said() -> None:
    found = decide(Outcome.SHARED)
    assert decision(found, "r").outcome is Outcome.SHARED
    assert decision(found, "r").finding
    assert "35.8 dB, budget 6.02 dB" in decision(found, "r").reason
    coarse = ranges(r=1e3, narrow=1.0, wide=1e3)
    found = decide(Outcome.SHARED, Outcome.WIDE_ROOT, seen=coarse)
    mine = decision(found, "r")
    assert mine.outcome is Outcome.WIDE_ROOT
    assert mine.finding
    assert dict(mine.rejected)["SHARED"].startswith("costs narrow 60")


def test_a_branch_that_is_read_in_float_is_quantized_only_with_its_root() -> None:
    leaves = (Leaf(cell="a"), Leaf(cell="b"), Leaf(cell="read", read_in_float=True))
    plan = Plan(cells=cells("r", "a", "b", "read"), families=(family("r", *leaves, rules=rules(*ALL)),))
    shared = resolve(plan, ranges(r=1.0, a=1.0, b=1.0, read=0.9))
    assert len({a.qparams for a in shared.assignments.values()}) == 1
    found = resolve(plan, ranges(r=62.0, a=1.0, b=62.0, read=62.0))
    assert decision(found, "r").outcome is Outcome.FLOAT_ROOT
    assert found.assignments["read"].qparams is None
    lossy = resolve(plan, ranges(r=62.0, a=62.0, b=62.0, read=0.1))
    assert decision(lossy, "r").outcome is Outcome.FLOAT_ROOT  # what is read in float would lose too


@pytest.mark.parametrize(("budget", "outcome"), [(6.02, Outcome.INDEPENDENT), (24.1, Outcome.SHARED)])
def test_branches_of_a_float_root_that_nothing_quantized_reads_share_or_are_moved_in_float(
    budget: float, outcome: Outcome
) -> None:
    leaves = (Leaf(cell="a", read_in_float=True), Leaf(cell="b", read_in_float=True))
    mine = rules(Outcome.SHARED, Outcome.INDEPENDENT, max_float_loss_db=budget)
    plan = Plan(cells=cells("r", "a", "b"), families=(family("r", *leaves, root_is_float=True, rules=mine),))
    found = resolve(plan, ranges(r=10.0, a=1.0, b=10.0))
    assert decision(found, "r").outcome is outcome
    assert not decision(found, "r").finding
    assert len({each.qparams for each in found.assignments.values()}) == 1
    assert (found.assignments["r"].qparams is None) is (outcome is Outcome.INDEPENDENT)


def test_masks_get_no_qparams_and_large_measurements_do() -> None:
    plan = Plan(cells=cells("mask", "large"))
    found = resolve(plan, {"mask": Range(-3.4e38, 5.0), "large": Range(1e31, 2e31)})
    assert found.assignments["mask"].qparams is None
    assert found.assignments["large"].qparams == choose_qparams(Range(1e31, 2e31), INT8_AFFINE)
    (told,) = found.decisions
    assert told.outcome is TensorOutcome.FLOAT
    assert told.where == plan.cells["mask"].where


def test_branches_without_a_range_take_no_part() -> None:
    plan = Plan(cells=cells("a", "b", "c"), families=(family(None, "a", "b", "c"),))
    found = resolve(plan, ranges(a=1.0, b=1.0))
    assert "c" not in found.assignments
    assert decision(found, "None").groups == (("a", "b"),)
    assert resolve(plan, {}).decisions == ()


def test_a_branch_of_zeros_loses_nothing_and_shares_with_anyone() -> None:
    plan = Plan(cells=cells("a", "zero"), families=(family(None, "a", "zero"),))
    found = resolve(plan, ranges(a=100.0, zero=0.0))
    assert decision(found, "None").outcome is Outcome.SHARED
    assert decision(found, "None").worst_loss_db == 0.0


def test_a_weight_follows_its_op() -> None:
    weight = cell("w", INT8_SYMMETRIC, follows=frozenset({"r", "x"}))
    each = family("r", "narrow", "wide", rules=rules(Outcome.SHARED, Outcome.FLOAT_ROOT))
    plan = Plan(cells=cells("r", "narrow", "wide", "x", w=weight), families=(each,))
    assert resolve(plan, NARROW_AND_WIDE | ranges(w=1.0, x=1.0)).assignments["w"].qparams is None
    alike = ranges(r=1.0, narrow=1.0, wide=1.0, w=1.0, x=1.0)
    assert resolve(plan, alike).assignments["w"].qparams is not None
    del alike["x"]  # no data reached the input, which stays float: a weight alone would be of no use
    assert resolve(plan, alike).assignments["w"].qparams is None


# -- hoists -------------------------------------------------------------------------------------------------

THREE = ranges(a=(-1.0, 1.7), b=(-1.0, 1.72), c=(0.0, 100.0))


def hoisted(**fields: Any) -> Resolution:
    above = hoist("a", "b", "c", **fields)
    return resolve(
        Plan(cells=cells("a", "b", "c"), families=(family(None, "a", "b", "c", rules=above.rules),), hoists=(above,)),
        THREE,
    )


@pytest.mark.parametrize("rule", [HoistRule.NEVER, HoistRule.IDENTICAL])
def test_differing_branches_are_left_alone_where_the_pass_leaves_them(rule: HoistRule) -> None:
    found = hoisted(hoist=rule)
    assert all(a.qparams is not None for a in found.assignments.values())
    assert sets(decision(found, "None").groups) == {frozenset("ab"), frozenset("c")}


def test_a_conflict_keeps_the_cheapest_that_differs_in_float() -> None:
    found = hoisted()
    assert [n for n, a in found.assignments.items() if a.qparams is None] == ["c"]
    assert decision(found, "None").notes == (
        "the backend hoists across differing qparams: c stays float, so that it does not",
    )
    pair = Plan(cells=cells("a", "c"), hoists=(hoist("a", "c"),))
    found = resolve(pair, THREE)
    assert [n for n, a in found.assignments.items() if a.qparams is None] == ["a"]  # neither group is larger
    assert decision(found, "None").outcome is Outcome.INDEPENDENT


def test_a_conflict_resolved_by_union_reports_its_loss() -> None:
    found = hoisted(conflict=Conflict.UNION)
    assert len({a.qparams for a in found.assignments.values()}) == 1
    mine = decision(found, "None")
    assert mine.finding
    assert mine.worst_loss_db == pytest.approx(20 * math.log10(101 / 2.7), abs=0.01)
    assert "covering range" in mine.notes[0]


def test_no_union_of_two_schemes() -> None:
    plan = Plan(cells=cells("a", b=cell("b", INT16_SYMMETRIC)), hoists=(hoist("a", "b", conflict=Conflict.UNION),))
    found = resolve(plan, ranges(a=1.0, b=1.0))
    assert found.assignments["a"].qparams is None
    assert found.assignments["b"].qparams is not None


@pytest.mark.parametrize("rule", [HoistRule.ALWAYS, HoistRule.IDENTICAL])
def test_cells_of_no_common_family_are_made_alike_where_that_is_free(rule: HoistRule) -> None:
    plan = Plan(cells=cells("a", "out", "x"), joins=(join("out", "x"),), hoists=(hoist("a", "out", hoist=rule),))
    found = resolve(plan, ranges(a=(-1.0, 1.7), out=(-1.0, 1.72), x=(-1.0, 1.72)))
    assert len({a.qparams for a in found.assignments.values()}) == 1
    assert not [d for d in found.decisions if d.notes]


def test_one_float_cell_is_enough_for_two_tensors() -> None:
    plan = Plan(cells=cells("a", "b", "c"), hoists=(hoist("a", "b"), hoist("a", "c", where="x")))
    found = resolve(plan, ranges(a=1.0, b=5.0, c=9.0))
    assert [n for n, a in found.assignments.items() if a.qparams is None] == ["a"]


def test_branches_of_a_wide_root_are_hoisted_as_the_root() -> None:
    each = family("r", "a", "b", rules=rules(*ALL), wide=INT16_SYMMETRIC)
    plan = Plan(cells=cells("r", "a", "b"), families=(each,), hoists=(hoist("a", "b", where="r (root)"),))
    found = resolve(plan, ranges(r=62.0, a=1.0, b=62.0))
    assert all(a.qparams is not None for a in found.assignments.values())


# -- joins --------------------------------------------------------------------------------------------------


def test_operands_that_only_the_join_reads_share_whatever_it_costs_them() -> None:
    for names in (("a", "b"), ("b", "a")):
        plan = Plan(cells=cells("a", "b", "out"), joins=(join("out", *names),))
        found = resolve(plan, ranges(a=1.0, b=10.0, out=10.0))
        assert decision(found, "out").outcome is JoinOutcome.SHARED
        assert len({a.qparams for a in found.assignments.values()}) == 1
        assert dict(decision(found, "out").losses_db)["a"] == pytest.approx(20.0, abs=1e-3)


def test_an_operand_with_other_readers_is_requantized_at_the_edge() -> None:
    plan = Plan(cells=cells("a", "b", "out"), joins=(join("out", "a", "b", exclusive=False),))
    found = resolve(plan, ranges(a=1.0, b=10.0, out=10.0))
    mine = decision(found, "out")
    assert mine.outcome is JoinOutcome.REQUANTIZE
    assert "a keeps its own qparams: sharing would cost 20.0 dB, budget 0.5 dB" in mine.reason
    assert sets(mine.groups) == {frozenset(["a"]), frozenset(["out", "b"])}
    assert not mine.finding


def test_a_join_is_no_finer_than_what_goes_in() -> None:
    def run(all_have_steps: bool, **ends: float) -> JoinOutcome:
        plan = Plan(
            cells=cells("a", "b", "out"), joins=(join("out", "a", "b", exclusive=False, all_have_steps=all_have_steps),)
        )
        mine = decision(resolve(plan, ranges(**ends)), "out").outcome
        assert isinstance(mine, JoinOutcome)
        return mine

    assert run(True, a=1.0, b=1.0, out=0.5) is JoinOutcome.SHARED
    assert run(False, a=1.0, b=1.0, out=0.5) is JoinOutcome.REQUANTIZE  # what else goes in has no steps yet
    assert run(True, a=1.0, b=2.0, out=0.5) is JoinOutcome.REQUANTIZE  # a would lose 6 dB
    assert run(True, a=1.0, b=0.5, out=0.5) is JoinOutcome.REQUANTIZE  # b is as fine as the join


def test_a_join_stays_fine_for_an_operand_that_would_be_rounded_at_both_scales() -> None:
    together = join("out", "a", "b", exclusive=False, all_have_steps=True)
    plan = Plan(cells=cells("a", "b", "out"), joins=(together,))
    found = resolve(plan, ranges(a=1.0, b=1.2, out=0.5))  # 1.6 dB apart, 0.5 allowed
    assert decision(found, "out").outcome is JoinOutcome.REQUANTIZE
    assert found.assignments["out"].qparams == choose_qparams(Range(-0.5, 0.5), plan.cells["out"].scheme)


def test_a_join_is_finer_than_branches_of_a_wide_root() -> None:
    above = family("r", "a", "b", wide=INT16_SYMMETRIC, rules=rules(Outcome.SHARED, Outcome.WIDE_ROOT))
    together = join("out", "a", "b", exclusive=False, all_have_steps=True)
    plan = Plan(cells=cells("r", "a", "b", "out"), families=(above,), joins=(together,))
    found = resolve(plan, ranges(r=10.0, a=1.0, b=1.0, out=0.5))
    assert decision(found, "r (root)").outcome is Outcome.WIDE_ROOT
    assert found.assignments["out"].qparams == choose_qparams(Range(-0.5, 0.5), plan.cells["out"].scheme)


def test_a_contract_keeps_an_operand_apart_and_is_a_finding_where_that_is_illegal() -> None:
    for outcomes in ((JoinOutcome.SHARED, JoinOutcome.REQUANTIZE), (JoinOutcome.SHARED,)):
        plan = Plan(
            cells=cells("b", "out", a=cell("a", contract=RELU)), joins=(join("out", "a", "b", outcomes=outcomes),)
        )
        found = resolve(plan, ranges(a=(0.0, 1.0), b=1.0, out=1.0))
        qparams = found.assignments["a"].qparams
        assert qparams is not None
        assert qparams.honours(RELU)
        assert "no qparams serve both contracts" in decision(found, "out").reason
        assert decision(found, "out").finding is (JoinOutcome.REQUANTIZE not in outcomes)


def test_two_relus_share_their_contract() -> None:
    plan = Plan(
        cells=cells("out", a=cell("a", contract=RELU), b=cell("b", contract=RELU6)), joins=(join("out", "a", "b"),)
    )
    found = resolve(plan, ranges(a=(0.0, 6.0), b=(0.0, 6.0), out=(0.0, 6.0)))
    assert decision(found, "out").outcome is JoinOutcome.SHARED
    zeros = resolve(plan, ranges(a=(0.0, 0.0), b=(0.0, 0.0), out=(0.0, 0.0)))
    assert decision(zeros, "out").outcome is JoinOutcome.SHARED


@pytest.mark.parametrize("may_float", [True, False])
def test_a_join_that_would_ruin_an_operand_is_left_float(may_float: bool) -> None:
    plan = Plan(cells=cells("a", "b", "out"), joins=(join("out", "a", "b", may_float=may_float),))
    found = resolve(plan, ranges(a=0.1, b=10.0, out=10.0))
    mine = decision(found, "out")
    if may_float:
        assert mine.outcome is JoinOutcome.FLOAT
        assert "40.0 dB, budget 24.1 dB" in mine.reason
        assert found.assignments["out"].qparams is None
        assert found.assignments["a"].qparams == choose_qparams(Range(-0.1, 0.1), plan.cells["a"].scheme)
    else:
        assert mine.outcome is JoinOutcome.SHARED
        assert mine.finding


def test_a_join_is_not_left_float_for_what_its_operands_have_lost_already() -> None:
    above = family("r", "a", "b", rules=rules(Outcome.SHARED))
    plan = Plan(cells=cells("r", "a", "b", "out"), families=(above,), joins=(join("out", "a", "b", may_float=True),))
    found = resolve(plan, ranges(r=10.0, a=0.1, b=10.0, out=10.0))
    assert decision(found, "out").outcome is JoinOutcome.SHARED
    assert len({a.qparams for a in found.assignments.values()}) == 1


def test_operands_don_t_widen_for_a_join_whose_output_stays_float() -> None:
    below = family("out", "c", "d", rules=rules(Outcome.SHARED, Outcome.FLOAT_ROOT))
    plan = Plan(
        cells=cells("a", "b", "out", "c", "d"), families=(below,), joins=(join("out", "a", "b", may_float=True),)
    )
    found = resolve(plan, ranges(a=1.0, b=10.0, out=10.0, c=1.0, d=10.0))
    assert decision(found, "out (root)").outcome is Outcome.FLOAT_ROOT
    assert decision(found, "out (cat)").outcome is JoinOutcome.FLOAT
    assert found.assignments["a"].qparams == choose_qparams(Range(-1.0, 1.0), plan.cells["a"].scheme)
    assert found.assignments["a"].qparams == found.assignments["c"].qparams


def test_branches_of_a_join_that_is_left_float_are_independent() -> None:
    below = family("out", "c", "d", rules=rules(Outcome.SHARED, Outcome.INDEPENDENT))
    plan = Plan(
        cells=cells("a", "b", "out", "c", "d"), families=(below,), joins=(join("out", "a", "b", may_float=True),)
    )
    found = resolve(plan, ranges(a=0.1, b=10.0, out=10.0, c=0.1, d=10.0))
    assert decision(found, "out (cat)").outcome is JoinOutcome.FLOAT
    assert decision(found, "out (root)").outcome is Outcome.INDEPENDENT
    assert decision(found, "out (root)").worst_loss_db == 0.0


def test_a_wide_root_that_a_join_reads_keeps_apart_from_it() -> None:
    above = family("r", "a", "b", rules=rules(*ALL), wide=INT16_SYMMETRIC)
    plan = Plan(cells=cells("r", "a", "b", "out"), families=(above,), joins=(join("out", "r", exclusive=False),))
    found = resolve(plan, ranges(r=62.0, a=1.0, b=62.0, out=62.0))
    assert decision(found, "out").outcome is JoinOutcome.REQUANTIZE
    wide, out = found.assignments["r"].qparams, found.assignments["out"].qparams
    assert wide is not None
    assert out is not None
    assert wide.scheme == INT16_SYMMETRIC
    assert out.scheme == plan.cells["out"].scheme


def test_a_chain_of_joins_is_decided_from_its_beginning() -> None:
    joins = (join("second", "first", "c"), join("first", "a", "b"))  # listed in the wrong order
    plan = Plan(cells=cells("a", "b", "c", "first", "second"), joins=joins)
    found = resolve(plan, ranges(a=1.0, b=1.0, c=1.0, first=1.0, second=1.0))
    assert len({a.qparams for a in found.assignments.values()}) == 1
    assert {a.group for a in found.assignments.values()} == {"a"}


def test_split_join_split() -> None:
    """x cut into a and b, joined again, cut again: alike throughout, or each part by itself."""
    above, below = family("x", "a", "b", rules=rules(*ALL)), family("out", "c", "d", rules=rules(*ALL))
    plan = Plan(
        cells=cells("x", "a", "b", "out", "c", "d"),
        families=(above, below),
        joins=(join("out", "a", "b", may_float=True),),
    )
    alike = resolve(plan, ranges(x=2.0, a=2.0, b=1.9, out=2.0, c=2.0, d=1.9))
    assert len({a.qparams for a in alike.assignments.values()}) == 1
    apart = resolve(plan, ranges(x=90.0, a=1.0, b=90.0, out=90.0, c=1.0, d=90.0))
    assert apart.assignments["x"].qparams is None
    assert apart.assignments["out"].qparams is None
    for narrow in ("a", "c"):
        assert apart.assignments[narrow].qparams == choose_qparams(Range(-1.0, 1.0), plan.cells["a"].scheme)
