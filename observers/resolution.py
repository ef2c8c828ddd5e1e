"""Resolve a plan: from the ranges of its cells to qparams, with a decision on record for each family and join.

Pure: the same plan and ranges give the same resolution, whatever the order in which ranges were seen. Families
are decided first (they say which roots are quantized at all), then joins, both in graph order. Cells that end
up with one qparams form a cluster; a cluster's range covers every member's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .grouping import partition
from .qparams import QParams, choose_qparams, scale_of, sharing_loss_db
from .ranges import UNBOUNDED, Bounds, Range
from .rules import Conflict, Decision, HoistRule, JoinOutcome, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .plan import Cell, Family, Join, JoinInput, Leaf, Plan
    from .qparams import Scheme


@dataclass(frozen=True)
class Assignment:
    """What a cell ends up with.

    Args:
        group: the name of the cluster; cells with the same group have bit-identical qparams.
        qparams: the qparams, or None where the cell stays float.
        through: for a branch of a wide root: the root's qparams, which its values pass first.
        root: the name of that root's cell.
    """

    group: str
    qparams: QParams | None
    through: QParams | None = None
    root: str | None = None


@dataclass(frozen=True)
class Resolution:
    """What was decided: an assignment for each cell whose range is known, and the decisions."""

    assignments: Mapping[str, Assignment]
    decisions: tuple[Decision, ...]


def resolve(plan: Plan, ranges: Mapping[str, Range], exact: Mapping[str, Range] | None = None) -> Resolution:
    """Decide every family and join of `plan`, from the ranges (cell name -> range) that are known.

    Cells without a range get no assignment, and take no part in a decision. `exact` are the ranges that hold every
    value seen, where an estimator cut `ranges` to fit a narrow scheme: a root that is widened uses them.
    """
    return _Resolver(plan, ranges, ranges if exact is None else exact).run()


def own_scale(cell: Cell, range_: Range) -> float:
    """Return the scale that the cell would have by itself, in real units per code."""
    return cell.fixed.scale if cell.fixed else scale_of(range_.clamp(cell.contract), cell.scheme)


@dataclass
class _Cluster:
    """Cells with one qparams."""

    name: str
    range: Range
    scheme: Scheme
    members: list[str]
    contracts: frozenset[Bounds]
    fixed: QParams | None = None

    def qparams(self) -> QParams:
        if self.fixed:
            return self.fixed
        bounds = next(iter(self.contracts)) if len(self.contracts) == 1 else UNBOUNDED
        return choose_qparams(self.range, self.scheme, bounds)

    def merged(self, other: _Cluster) -> _Cluster | None:
        """Return this cluster with the other one in it, or None if no qparams serve both."""
        if self.scheme != other.scheme or (self.fixed and other.fixed and self.fixed != other.fixed):
            return None
        both = _Cluster(
            self.name,
            self.range.union(other.range),
            self.scheme,
            self.members + other.members,
            self.contracts | other.contracts,
            self.fixed or other.fixed,
        )
        qparams = both.qparams()
        kept = all(qparams.honours(bounds) for bounds in both.contracts)
        return both if kept and qparams.covers(both.range) else None


@dataclass
class _Resolver:
    plan: Plan
    ranges: Mapping[str, Range]
    exact: Mapping[str, Range]
    clusters: dict[str, _Cluster] = field(default_factory=dict)
    floats: set[str] = field(default_factory=set)
    through: dict[str, str] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def run(self) -> Resolution:
        for name, cell in self.plan.cells.items():
            if name in self.ranges:
                contracts = frozenset({cell.contract})
                self.clusters[name] = _Cluster(name, self.ranges[name], cell.scheme, [name], contracts, cell.fixed)
        for family in self.plan.families:
            self._decide_family(family)
        for join in self.plan.joins:
            self._decide_join(join)
        return Resolution(self._assign(), tuple(self.decisions))

    def _assign(self) -> dict[str, Assignment]:
        qparams = {id(cluster): cluster.qparams() for cluster in self.clusters.values()}
        result = {}
        for name, cluster in self.clusters.items():
            if name in self.floats or self.plan.cells[name].follows & self.floats:
                result[name] = Assignment(name, None)
            else:
                root = self.through.get(name)
                wide = qparams[id(self.clusters[root])] if root else None
                result[name] = Assignment(cluster.name, qparams[id(cluster)], wide, root)
        return result

    def _merge(self, names: list[str]) -> None:
        """Put the cells in one cluster; callers have made sure that it holds."""
        first = self.clusters[names[0]]
        for name in names[1:]:
            other = self.clusters[name]
            if other is first:
                continue
            first.range = first.range.union(other.range)
            first.members += other.members
            first.contracts |= other.contracts
            first.fixed = first.fixed or other.fixed
            for member in other.members:
                self.clusters[member] = first

    def _own(self, name: str) -> float:
        return own_scale(self.plan.cells[name], self.ranges[name])

    def _losses(self, names: list[str], scale: float) -> dict[str, float]:
        return {
            name: sharing_loss_db(self._own(name), scale) if _is_spread(self.ranges[name]) else 0.0 for name in names
        }

    # -- branch families ------------------------------------------------------------------------------------

    def _decide_family(self, family: Family) -> None:
        leaves = [leaf for leaf in family.leaves if leaf.cell in self.clusters]
        if not leaves:
            return
        names = list(dict.fromkeys(leaf.cell for leaf in leaves))
        root = family.root if family.root in self.clusters else None
        everyone = [*([root] if root else []), *names]
        shared = self._shared_scale(everyone)
        losses = self._losses(names, shared) if shared else {}
        rejected: list[tuple[str, str]] = []
        for outcome in family.rules.outcomes:
            why_not = self._why_not(outcome, family, root, losses)
            if why_not is None:
                self._take(outcome, family, leaves, everyone, losses, rejected=tuple(rejected))
                return
            rejected.append((outcome.name, why_not))
        self._take(Outcome.SHARED, family, leaves, everyone, losses, rejected=tuple(rejected), finding=True)

    def _shared_scale(self, names: list[str]) -> float | None:
        """Return the scale of one qparams for all the cells, or None if no qparams serve all."""
        cluster: _Cluster | None = self.clusters[names[0]]
        for name in names[1:]:
            cluster = cluster.merged(self.clusters[name]) if cluster else None
        return cluster.qparams().scale if cluster else None

    def _why_not(self, outcome: Outcome, family: Family, root: str | None, losses: Mapping[str, float]) -> str | None:
        rules = family.rules
        if outcome is Outcome.SHARED:
            budget = rules.max_root_loss_db if root else rules.max_sharing_loss_db
            if not losses:
                return "no qparams serve every branch"
            worst = max(losses, key=lambda name: losses[name])
            if losses[worst] <= budget:
                return None
            return f"costs {worst} {losses[worst]:.1f} dB, budget {budget:g} dB"
        if outcome is Outcome.INDEPENDENT:
            return None if family.root_is_float else "the root is not a float tensor"
        if outcome is Outcome.SPLIT_PRODUCER:
            return "cutting the producer is not done in this version"
        if family.root_is_float:
            return "the root is float anyway"
        if outcome is Outcome.WIDE_ROOT:
            return None if family.wide and root else "no wide scheme"
        return None

    def _take(
        self,
        outcome: Outcome,
        family: Family,
        leaves: list[Leaf],
        everyone: list[str],
        shared_losses: Mapping[str, float],
        *,
        rejected: tuple[tuple[str, str], ...],
        finding: bool = False,
    ) -> None:
        names = list(dict.fromkeys(leaf.cell for leaf in leaves))
        notes: list[str] = []
        if outcome is Outcome.SHARED:
            groups = [tuple(names)]
            losses = dict(shared_losses)
            self._merge(everyone)
        else:
            in_float = {leaf.cell for leaf in leaves if leaf.read_in_float}
            self.floats |= in_float
            names = [name for name in names if name not in in_float]
            leaves = [leaf for leaf in leaves if leaf.cell not in in_float]
            groups, losses = self._grouped(names, family)
            if len(groups) > 1 and family.hoistable and family.rules.hoist is HoistRule.ALWAYS:
                groups, losses, finding = self._settle_conflict(family, leaves, groups, losses, notes)
            if family.root in self.clusters:
                self._free_root(outcome, family, names)
        self.decisions.append(
            Decision(
                "branches",
                family.where,
                outcome,
                tuple(groups),
                tuple((n, (self.ranges[n].min, self.ranges[n].max)) for n in everyone),
                tuple(losses.items()),
                _reason(outcome, groups, losses),
                rejected,
                finding,
                tuple(notes),
            )
        )

    def _grouped(self, names: list[str], family: Family) -> tuple[list[tuple[str, ...]], dict[str, float]]:
        if not names:
            return [], {}
        scheme = self.plan.cells[names[0]].scheme
        ranges = {name: self.ranges[name].clamp(self.plan.cells[name].contract) for name in names}
        budget = family.rules.max_sharing_loss_db
        found = partition(ranges, scheme, budget, partial=family.rules.partial_groups)
        losses: dict[str, float] = {}
        for group in found:
            self._merge(list(group.members))
            losses |= dict(zip(group.members, group.losses_db, strict=True))
        return [group.members for group in found], losses

    def _free_root(self, outcome: Outcome, family: Family, names: list[str]) -> None:
        root = family.root
        if root is None:
            return
        if outcome is Outcome.WIDE_ROOT and family.wide:
            self.clusters[root].scheme = family.wide
            self.clusters[root].range = self.exact[root]
            self.through |= dict.fromkeys(names, root)
        else:
            self.floats.add(root)

    def _settle_conflict(
        self,
        family: Family,
        leaves: list[Leaf],
        groups: list[tuple[str, ...]],
        losses: dict[str, float],
        notes: list[str],
    ) -> tuple[list[tuple[str, ...]], dict[str, float], bool]:
        """Make sure that differing qparams never reach a pass that hoists whatever it meets."""
        names = [leaf.cell for leaf in leaves]
        if family.rules.conflict is Conflict.UNION:
            self._merge(names)
            losses = self._losses(names, self.clusters[names[0]].qparams().scale)
            notes.append("the backend hoists across differing qparams: the branches share the covering range")
            return [tuple(dict.fromkeys(names))], losses, True
        largest = max(groups, key=len)
        cost: dict[str, int] = {}
        for leaf in leaves:
            cost[leaf.cell] = cost.get(leaf.cell, 0) + leaf.consumer_cost
        cheapest = min((n for group in groups if group is not largest for n in group), key=lambda n: cost[n])
        self.floats.add(cheapest)
        notes.append(f"the backend hoists across differing qparams: {cheapest} stays float, so that it does not")
        kept = [tuple(n for n in group if n != cheapest) for group in groups]
        return [group for group in kept if group], {n: db for n, db in losses.items() if n != cheapest}, False

    # -- joins ----------------------------------------------------------------------------------------------

    def _decide_join(self, join: Join) -> None:
        if join.output not in self.clusters:
            return
        inputs = [i for i in join.inputs if i.cell in self.clusters]
        own = {i.cell: self._own(i.cell) for i in inputs}
        losses = self._losses(list(own), self.clusters[join.output].qparams().scale)
        worst = max(losses.values(), default=0.0)
        too_lossy = worst > join.rules.max_float_loss_db
        if too_lossy and join.may_float and JoinOutcome.FLOAT in join.rules.outcomes:
            self.floats.add(join.output)
            why = f"one qparams would cost an operand {worst:.1f} dB, budget {join.rules.max_float_loss_db:g} dB"
            self._record(join, JoinOutcome.FLOAT, [(n,) for n in own], dict.fromkeys(own, 0.0), why, finding=False)
            return
        apart = {i.cell: found for i in inputs if (found := self._why_apart(i, join))}
        for cell in own:
            if cell not in apart and cell not in self.floats:
                self._merge([join.output, cell])
        group = (join.output, *(n for n in own if n not in apart))
        outcome = JoinOutcome.REQUANTIZE if apart else JoinOutcome.SHARED
        reason = "; ".join(f"{cell} keeps its own qparams: {why}" for cell, why in apart.items())
        self._record(
            join, outcome, [group, *((n,) for n in apart)], losses, reason or "one qparams serve all", finding=too_lossy
        )

    def _why_apart(self, operand: JoinInput, join: Join) -> str | None:
        """Return why an operand can't have the join's qparams, or None if it is to share them."""
        output, mine = self.clusters[join.output], self.clusters[operand.cell]
        if mine is output or operand.cell in self.floats:
            return None
        both = output.merged(mine)
        if both is None:
            return "no qparams serve both contracts"
        if JoinOutcome.REQUANTIZE not in join.rules.outcomes:
            return None
        scale, budget = both.qparams().scale, join.rules.max_sharing_loss_db
        others = [n for n in mine.members if n != operand.cell or not operand.exclusive]
        worst = max((self._losses(others + output.members, scale) or {"": 0.0}).values())
        return f"sharing would cost {worst:.1f} dB, budget {budget:g} dB" if worst > budget else None

    def _record(
        self,
        join: Join,
        outcome: JoinOutcome,
        groups: list[tuple[str, ...]],
        losses: Mapping[str, float],
        reason: str,
        *,
        finding: bool,
    ) -> None:
        names = [join.output, *(i.cell for i in join.inputs if i.cell in self.ranges)]
        ranges = tuple((n, (self.ranges[n].min, self.ranges[n].max)) for n in names)
        self.decisions.append(
            Decision("join", join.where, outcome, tuple(groups), ranges, tuple(losses.items()), reason, (), finding)
        )


def _is_spread(range_: Range) -> bool:
    """Tell whether the tensor holds anything but 0, which is exact at any scale."""
    return range_.min != 0.0 or range_.max != 0.0


def _reason(outcome: Outcome, groups: list[tuple[str, ...]], losses: Mapping[str, float]) -> str:
    worst = max(losses.values(), default=0.0)
    if outcome is Outcome.SHARED:
        return f"one qparams cost no branch more than {worst:.2f} dB"
    return f"{len(groups)} qparam group(s), no branch loses more than {worst:.2f} dB by sharing"
