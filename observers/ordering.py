"""The order in which a plan is decided: whatever provides a cell before whatever reads it.

A family settles its root and its leaves, a join its output; a join's output may be a family's root, and a leaf a
join's operand. The families below a join's output belong to the join: whether that output stays float is decided
with both in view. The order depends on the names alone, not on how the plan lists its parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Family, Join, Plan


@dataclass(frozen=True)
class Step:
    """A join with the families below its output, or a family by itself."""

    join: Join | None
    families: tuple[Family, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """A name for the step that does not depend on the order of a family's leaves."""
        if self.join is not None:
            return ("join", self.join.output, self.join.where)
        return ("family", *_key(self.families[0]))

    def provides(self) -> set[str]:
        """Return the cells that are settled by this step."""
        found = {leaf.cell for family in self.families for leaf in family.leaves}
        found |= {family.root for family in self.families if family.root}
        return found | ({self.join.output} if self.join else set())

    def reads(self) -> set[str]:
        """Return the cells that should be settled before this step."""
        return {i.cell for i in self.join.inputs} if self.join else {f.root for f in self.families if f.root}


def _key(family: Family) -> tuple[str, ...]:
    return (family.root or "", family.where, *sorted(leaf.cell for leaf in family.leaves))


def steps(plan: Plan) -> list[Step]:
    """Return the families and joins of a plan in the order in which they are to be decided."""
    below: dict[str, list[Family]] = {join.output: [] for join in plan.joins}
    found: list[Step] = []
    for family in plan.families:
        if family.root in below:
            below[family.root].append(family)
        else:
            found.append(Step(None, (family,)))
    joins = sorted(plan.joins, key=lambda join: (join.output, join.where))
    found += [Step(join, tuple(sorted(below.pop(join.output, ()), key=_key))) for join in joins]
    return _sorted(sorted(found, key=lambda step: step.key))


def _sorted(found: list[Step]) -> list[Step]:
    """Sort topologically, by position among those that are free; a cycle (in no real graph) is cut at its first."""
    providers: dict[str, list[int]] = {}
    for index, step in enumerate(found):
        for cell in step.provides():
            providers.setdefault(cell, []).append(index)
    before: list[set[int]] = [{p for cell in step.reads() for p in providers.get(cell, ())} for step in found]
    after: dict[int, list[int]] = {}
    for index, sources in enumerate(before):
        sources.discard(index)
        for source in sources:
            after.setdefault(source, []).append(index)
    waiting = [len(sources) for sources in before]
    free = [index for index, count in enumerate(waiting) if not count]
    left = dict.fromkeys(range(len(found)))
    result = []
    while left:
        index = heapq.heappop(free) if free else next(iter(left))
        if index not in left:
            continue
        del left[index]
        result.append(found[index])
        for each in after.get(index, ()):
            waiting[each] -= 1
            if waiting[each] == 0 and each in left:
                heapq.heappush(free, each)
    return result
