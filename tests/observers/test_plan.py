"""Plans fall apart into components that can be decided one by one."""

from __future__ import annotations

import time

from hypothesis import given

from quantmark.observers.plan import Plan, family_cells
from quantmark.observers.ranges import Range
from quantmark.observers.resolution import resolve
from support.plans import cell, cells, family, hoist, join, plans


@given(plans())
def test_components_hold_every_part_once(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan = case[0]
    parts = plan.components()
    assert sorted(name for part in parts for name in part.cells) == sorted(plan.cells)
    assert {id(f) for part in parts for f in part.families} == {id(f) for f in plan.families}
    assert {id(j) for part in parts for j in part.joins} == {id(j) for j in plan.joins}
    assert {id(h) for part in parts for h in part.hoists} == {id(h) for h in plan.hoists}
    for part in parts:
        named = [name for each in part.families for name in family_cells(each)]
        named += [name for each in part.joins for name in (each.output, *(i.cell for i in each.inputs))]
        named += [name for each in part.hoists for name in each.costs]
        named += [name for each in part.cells.values() for name in each.follows]
        assert set(named) <= part.cells.keys()


@given(plans())
def test_components_decide_what_the_whole_plan_does(case: tuple[Plan, dict[str, Range], dict[str, Range]]) -> None:
    plan, seen, exact = case
    whole = resolve(plan, seen, exact)
    parts = [resolve(part, seen, exact) for part in plan.components()]
    assert {name: a for part in parts for name, a in part.assignments.items()} == whole.assignments
    assert sorted(d.reason for part in parts for d in part.decisions) == sorted(d.reason for d in whole.decisions)


def test_what_has_nothing_to_do_with_each_other_is_apart() -> None:
    plan = Plan(
        cells=cells("a", "b", "c", "d", "e", "f", "g", w=cell("w", follows=frozenset({"g", "gone"}))),
        families=(family(None, "a", "b"),),
        joins=(join("c", "d"),),
        hoists=(hoist("e", "f"),),
    )
    assert [list(part.cells) for part in plan.components()] == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "w"]]


def test_components_of_a_large_plan_cost_no_more_per_cell() -> None:
    def seconds(size: int) -> float:
        names = [f"n{i}" for i in range(size)]
        weights = {f"w{i}": cell(f"w{i}", follows=frozenset({f"n{i}", f"n{i - 1}"})) for i in range(1, size)}
        plan = Plan(cells=cells(*names, **weights), families=(family(None, *names),))
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            (part,) = plan.components()
            best = min(best, time.perf_counter() - start)
        assert len(part.cells) == 2 * size - 1
        return best / size

    assert seconds(4000) < 8 * seconds(200)
