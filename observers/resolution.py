"""Resolve a plan: from the ranges of its cells to qparams, with a decision on record for each family and join.

Pure: the same plan and ranges give the same resolution, whatever the order in which ranges were seen, or in which
the plan lists its parts. A cell is settled before whatever reads it (see `ordering`): of a join's output, first
whether the join runs in float, then what becomes of the branches below it, then which operands share its qparams.
Last come the hoists: differing qparams never reach a pass that hoists whatever it meets.

Cells that end up with one qparams form a cluster. Clusters only ever grow, so what was made alike stays alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .aligning import align_joins
from .clusters import TOLERANCE_DB, Cluster, is_spread, own_scale, united, wide_qparams
from .errors import SharingConflictError
from .grouping import partition
from .hoisting import settle_hoists
from .ordering import steps
from .qparams import LARGEST_VALUE, sharing_loss_db
from .ranges import UNBOUNDED
from .records import FamilyRecord, HoistRecord, JoinRecord, TensorRecord
from .rules import Decision, JoinOutcome, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .plan import Family, Hoist, Join, JoinInput, Plan
    from .qparams import QParams, Scheme
    from .ranges import Range


@dataclass(frozen=True)
class Assignment:
    """What a cell ends up with.

    Args:
        group: the name of the cluster, which is the name of one of its quantized cells; cells with the same group
            have bit-identical qparams.
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
    return Resolver(plan, ranges, ranges if exact is None else exact).run()


@dataclass
class _Option:
    """An outcome with what it costs: (cell, loss in dB), and why it is not to be taken, or ""."""

    outcome: Outcome
    losses: dict[str, float]
    why_not: str = ""

    @property
    def worst(self) -> float:
        return max(self.losses.values(), default=0.0)


@dataclass
class Resolver:
    """The state of a resolution: which cells are float, which share, which pass a wide root."""

    plan: Plan
    ranges: Mapping[str, Range]
    exact: Mapping[str, Range]
    clusters: dict[str, Cluster] = field(default_factory=dict)
    floats: set[str] = field(default_factory=set)
    through: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    families: dict[int, FamilyRecord] = field(default_factory=dict)
    joins: dict[int, JoinRecord] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    lossy: set[str] = field(default_factory=set)
    tensors: list[TensorRecord] = field(default_factory=list)

    def run(self) -> Resolution:
        """Decide everything, in order."""
        for name, cell in self.plan.cells.items():
            if name in self.ranges and not self._is_too_wide(name):
                self.clusters[name] = Cluster.of(cell, self.ranges[name])
                self.floors[name] = self.clusters[name].floor
        for link in self.plan.links:
            self._link([name for name in link if name in self.clusters])
        for step in steps(self.plan):
            if step.join is not None:
                self._decide_float_join(step.join)
            for family in step.families:
                self._decide_family(family)
            if step.join is not None:
                self._decide_operands(step.join)
        align_joins(self)
        settle_hoists(self)
        records = [
            *self.tensors,
            *(self.families.get(id(family)) for family in self.plan.families),
            *(
                HoistRecord(hoist)
                for hoist in self.plan.hoists
                if hoist.where in self.notes and not self._is_told(hoist)
            ),
            *(self.joins.get(id(join)) for join in self.plan.joins),
        ]
        return Resolution(self._assign(), tuple(record.decision(self) for record in records if record))

    def _is_told(self, hoist: Hoist) -> bool:
        """Tell whether the record of a family tells of the hoist too: of the same root, with cells in common."""
        records = [record for record in self.families.values() if record.family.where == hoist.where]
        return any(not hoist.costs.keys().isdisjoint(record.cells) for record in records)

    def _link(self, names: list[str]) -> None:
        """Put the cells that the user linked in one cluster.

        Raises:
            SharingConflictError: if no qparams serve them all.
        """
        together = united([self.clusters[name] for name in names]) if names else None
        if names and together is None:
            places = ", ".join(self.plan.cells[name].where for name in names)
            raise SharingConflictError(f"no qparams serve all that was linked: {places}; unlink one of them")
        if together is not None:
            self.merge(together)
            self.accept(names, together.qparams.scale)

    def _is_too_wide(self, name: str) -> bool:
        """Leave a tensor float whose values are no measurements: masks of the smallest float, and what they touch."""
        seen = self.ranges[name]
        widest = max(-seen.min, seen.max)
        if widest <= LARGEST_VALUE or self.plan.cells[name].fixed:
            return False
        why = f"values up to {widest:.3g} are a mask, not a measurement: one step would be larger than all others"
        self.tensors.append(TensorRecord(name, why))
        self.floats.add(name)
        return True

    def _assign(self) -> dict[str, Assignment]:
        silent = self.plan.cells.keys() - self.clusters.keys()
        unfollowed = self.floats | silent
        quantized = [n for n in self.clusters if n not in self.floats and not self.plan.cells[n].follows & unfollowed]
        names: dict[int, str] = {}
        for name in sorted(quantized):
            names.setdefault(id(self.clusters[name]), name)
        result = {name: Assignment(name, None) for name in [*self.clusters, *self.floats]}
        least = self._least_headrooms()
        for name in quantized:
            cluster, root = self.clusters[name], self.through.get(name)
            wide = least.get(root, self.clusters[root].qparams) if root else None
            result[name] = Assignment(names[id(cluster)], least.get(name, cluster.qparams), wide, root)
        return result

    def _least_headrooms(self) -> dict[str, QParams]:
        """Return the qparams of the cells that share with one which may have less headroom than its scheme.

        No decision and no loss counts it: all members of a cluster have the same.
        """
        found: dict[str, QParams] = {}
        for name, cluster in self.clusters.items():
            if self.plan.cells[name].headroom is not None and name not in found:
                headrooms = (self.plan.cells[member].headroom for member in cluster.members)
                least = cluster.with_headroom(min(each for each in headrooms if each is not None))
                found |= dict.fromkeys(cluster.members, least)
        return found

    def own(self, name: str) -> float:
        """Return the scale that the cell would have by itself."""
        return own_scale(self.plan.cells[name], self.ranges[name])

    def loss_db(self, name: str, scale: float, through: float = 0.0) -> float:
        """Return what the scale costs a cell beside its own, in dB."""
        return sharing_loss_db(self.own(name), scale, through) if is_spread(self.ranges[name]) else 0.0

    def final_loss_db(self, name: str) -> float:
        """Return what a quantized cell loses by what was decided, in dB."""
        root = self.through.get(name)
        wide = self.clusters[root].qparams.scale if root else 0.0
        return self.loss_db(name, self.clusters[name].qparams.scale, wide)

    def merge(self, cluster: Cluster) -> None:
        """Take in a cluster that `united` returned."""
        for name in cluster.members:
            self.clusters[name] = cluster

    def accept(self, names: Iterable[str], scale: float) -> None:
        """Note that cells have to bear a scale: no later decision counts it against itself."""
        for name in names:
            self.floors[name] = max(self.floors[name], scale)
        for cluster in dict.fromkeys(self.clusters[name] for name in names):
            cluster.floor = min(self.floors[member] for member in cluster.members)

    # -- branch families ------------------------------------------------------------------------------------

    def _decide_family(self, family: Family) -> None:
        known = [leaf for leaf in family.leaves if leaf.cell in self.clusters]
        in_float = sorted({leaf.cell for leaf in known if leaf.read_in_float})
        names = sorted({leaf.cell for leaf in known} - set(in_float) - self.plan.apart)
        root = family.root if family.root in self.clusters and family.root not in self.floats else None
        if root is None:
            self.floats |= set(in_float)
            in_float = []
        if not names and not (in_float and root):
            return
        options = [self._option(outcome, family, root, names, in_float) for outcome in family.rules.outcomes]
        within = next((option for option in options if not option.why_not), None)
        legal = [o for o in options if o.losses] or [o for o in options if o.outcome is Outcome.SHARED]
        taken = within or min(legal, key=lambda option: option.worst)
        better = options if within is None else options[: options.index(taken)]
        rejected = [(o.outcome.name, o.why_not) for o in better if o is not taken]
        self._take(taken.outcome, family, root, names, in_float)
        listed = [*([root] if root else []), *dict.fromkeys(leaf.cell for leaf in known)]
        self.families[id(family)] = FamilyRecord(family, taken.outcome, listed, rejected, taken.why_not)

    def _option(
        self, outcome: Outcome, family: Family, root: str | None, names: list[str], in_float: list[str]
    ) -> _Option:
        """Return what an outcome would cost the family."""
        floating = family.root_is_float or root is None
        rules = family.rules
        budget = rules.max_root_loss_db if root else rules.max_sharing_loss_db
        if floating and not names:
            budget = rules.max_float_loss_db
        losses: dict[str, float] = {}
        if outcome is Outcome.SHARED:
            together = self._together(root, [*names, *in_float])
            if together is None:
                return _Option(outcome, {}, "no qparams serve every branch")
            losses = {name: self.loss_db(name, together.qparams.scale) for name in [*names, *in_float]}
        elif outcome is Outcome.INDEPENDENT:
            if not floating:
                return _Option(outcome, {}, "the root is not a float tensor")
        elif outcome is Outcome.SPLIT_PRODUCER:
            return _Option(outcome, {}, "cutting the producer is not done in this version")
        elif floating:
            return _Option(outcome, {}, "the root is float anyway")
        elif outcome is Outcome.WIDE_ROOT:
            wide = self._wide(family, root)
            if wide is None:
                return _Option(outcome, {}, "no wide scheme serves the root")
            for members in self._grouped(family, names):
                scale = (self._alike(members, family) or self.clusters[members[0]]).qparams.scale
                losses |= {name: self.loss_db(name, scale, wide.scale) for name in members}
        if not losses:
            return _Option(outcome, dict.fromkeys(names, 0.0))  # within the budget, because grouped by it
        worst = max(losses, key=lambda name: losses[name])
        if losses[worst] <= budget + TOLERANCE_DB:
            return _Option(outcome, losses)
        return _Option(outcome, losses, f"costs {worst} {losses[worst]:.1f} dB, budget {budget:g} dB")

    def _together(self, root: str | None, names: list[str]) -> Cluster | None:
        everyone = [self.clusters[name] for name in [*([root] if root else []), *names]]
        return united(everyone, dictated=bool(root and self.clusters[root].fixed))

    def _wide(self, family: Family, root: str | None) -> QParams | None:
        """Return the qparams of the root if it were widened, or None where it can't be."""
        if root is None or family.wide is None:
            return None
        cluster = self.clusters[root]
        if cluster.fixed or cluster.members != [root]:
            return None
        return wide_qparams(self.exact.get(root, self.ranges[root]), family.wide, cluster.contracts)

    def _take(self, outcome: Outcome, family: Family, root: str | None, names: list[str], in_float: list[str]) -> None:
        if outcome is Outcome.SHARED:
            self._share(root, [*names, *in_float])
            return
        wide = self._wide(family, root) if outcome is Outcome.WIDE_ROOT else None
        self.floats |= set(in_float)
        for members in self._grouped(family, names):
            cluster = self._alike(members, family)
            if cluster is not None:
                self.merge(cluster)
        if root is not None and wide is not None:
            seen = self.exact.get(root, self.ranges[root])
            self.clusters[root] = replace(self.clusters[root], range=seen, scheme=wide.scheme)
            self.through |= dict.fromkeys(names, root)
        elif root is not None:
            self.floats.add(root)

    def _share(self, root: str | None, names: list[str]) -> None:
        """Put the branches (and the root) in one cluster; those that no common qparams serve stay apart."""
        together = self._together(root, names)
        if together is not None:
            self.merge(together)
        else:
            base = root or names[0]
            for name in names:
                more = united([self.clusters[base], self.clusters[name]])
                if more is not None:
                    self.merge(more)
        self.accept(names, self.clusters[root or names[0]].qparams.scale)

    def _grouped(self, family: Family, names: list[str]) -> list[tuple[str, ...]]:
        """Return the groups within the budget, like with like."""
        by_scheme: dict[Scheme, dict[str, Range]] = {}
        for name in names:
            cell = self.plan.cells[name]
            by_scheme.setdefault(cell.scheme, {})[name] = self.ranges[name].clamp(cell.contract)
        budget, partial = family.rules.max_sharing_loss_db, family.rules.partial_groups
        return [
            group.members
            for scheme, ranges in by_scheme.items()
            for group in partition(ranges, scheme, budget, partial=partial)
        ]

    def _alike(self, members: tuple[str, ...], family: Family) -> Cluster | None:
        """Return the cluster that a group would make, or None where what is in it already forbids that."""
        cluster = united([self.clusters[name] for name in members])
        budget = family.rules.max_sharing_loss_db + TOLERANCE_DB
        return cluster if cluster is not None and cluster.loss_db() <= budget else None

    # -- joins ----------------------------------------------------------------------------------------------

    def _inputs(self, join: Join) -> list[JoinInput]:
        """Return the operands whose ranges are known, the smallest scale first."""
        known = [i for i in join.inputs if i.cell in self.clusters]
        return sorted(known, key=lambda i: (self.clusters[i.cell].qparams.scale, i.cell))

    def _decide_float_join(self, join: Join) -> None:
        """Leave a join float where one qparams for all would ruin an operand."""
        if join.output not in self.clusters:
            return
        record = self.joins[id(join)] = JoinRecord(join)
        scale, worst = self.clusters[join.output].qparams.scale, 0.0
        for operand in self._inputs(join):
            if is_spread(self.ranges[operand.cell]):
                already = 0.0 if operand.cell in self.floats else self.clusters[operand.cell].qparams.scale
                worst = max(worst, sharing_loss_db(max(self.own(operand.cell), already), scale))
        budget = join.rules.max_float_loss_db
        if worst <= budget or join.output in self.floats:
            return
        if join.may_float and JoinOutcome.FLOAT in join.rules.outcomes:
            self.floats.add(join.output)
            record.why_float = f"one qparams would cost an operand {worst:.1f} dB, budget {budget:g} dB"
        else:
            record.finding = True

    def _decide_operands(self, join: Join) -> None:
        """Decide which operands share the qparams of a join that is quantized."""
        record = self.joins.get(id(join))
        if record is None or join.output in self.floats:
            return
        needed = self.own(join.output)
        inputs = self._inputs(join)
        if self._have_steps(join, inputs):
            self.accept([join.output], self.clusters[inputs[0].cell].qparams.scale)
        for operand in inputs:
            if operand.cell in self.floats or self.clusters[operand.cell] is self.clusters[join.output]:
                continue
            floor = self._floor(operand, needed)
            both = united([self.clusters[join.output], self.clusters[operand.cell]])
            contradicting = both is None
            both = both or self.unfolded(join, operand.cell)
            why = self._why_apart(both, floor, join)
            if {operand.cell, join.output} & self.plan.apart:
                record.apart[operand.cell] = "the user unlinked it"
                continue
            if both is None or why:
                record.apart[operand.cell] = why
                if contradicting:
                    record.contradicting.add(operand.cell)
                record.finding |= JoinOutcome.REQUANTIZE not in join.rules.outcomes
                continue
            if contradicting:
                record.unfolded.add(operand.cell)
            both.floor = min(floor, self.clusters[join.output].floor)
            if operand.exclusive:
                self.floors[operand.cell] = max(self.floors[operand.cell], needed)
            self.merge(both)

    def _have_steps(self, join: Join, inputs: list[JoinInput]) -> bool:
        """Tell whether all that a join reads has about the same steps already, so that a finer scale wins nothing.

        A pool has its input's steps, however little is left of the range: a finer scale would round once more. Not so
        where an operand is float or int16 up to the join, nor where one would stay apart: it is rounded at both scales.
        """
        cells = {operand.cell for operand in inputs}
        finer = self.floats | self.through.keys() | self.plan.apart
        if not (inputs and join.all_have_steps and len(inputs) == len(join.inputs)) or cells & finer:
            return False
        everyone = united([self.clusters[cell] for cell in (join.output, *sorted(cells))])
        finest, budget = self.clusters[inputs[0].cell].qparams.scale, join.rules.max_sharing_loss_db
        return everyone is not None and sharing_loss_db(finest, everyone.qparams.scale) <= budget + TOLERANCE_DB

    def unfolded(self, join: Join, operand: str) -> Cluster | None:
        """Return the cluster of a join and an operand whose activations become ops of their own; None if none is."""
        if JoinOutcome.UNFOLD not in join.rules.outcomes:
            return None
        one = united([self._without_contracts(self.clusters[cell]) for cell in (join.output, operand)])
        return one if one is not None and self._leaves_a_step(one) else None

    def _leaves_a_step(self, cluster: Cluster) -> bool:
        """Tell whether each activation can write more than one code: below that it would be the op that loses all."""
        qparams = cluster.qparams
        left = (qparams.representable.clamp(self.plan.cells[name].contract) for name in cluster.members)
        return all(each.max - each.min >= qparams.scale for each in left)

    def _without_contracts(self, cluster: Cluster) -> Cluster:
        """Return a cluster without the contracts that its members may drop."""
        cells = (self.plan.cells[name] for name in cluster.members)
        kept = frozenset(UNBOUNDED if cell.may_unfold else cell.contract for cell in cells)
        return replace(cluster, contracts=kept)

    def _floor(self, operand: JoinInput, needed: float) -> float:
        """Return the smallest scale that a cell alike with the operand would have without the join.

        What the join alone reads has the join's scale at that edge in any case.
        """
        mine = self.clusters[operand.cell]
        if not operand.exclusive:
            return mine.floor
        others = (self.floors[name] for name in mine.members if name != operand.cell)
        return min(others, default=max(self.floors[operand.cell], needed))

    def _why_apart(self, both: Cluster | None, floor: float, join: Join) -> str:
        """Return why an operand can't have the join's qparams, or "" if it is to have them."""
        if both is None:
            return "no qparams serve both contracts"
        if JoinOutcome.REQUANTIZE not in join.rules.outcomes:
            return ""
        least, budget = min(floor, self.clusters[join.output].floor), join.rules.max_sharing_loss_db
        loss = sharing_loss_db(least, both.qparams.scale) if math.isfinite(least) else 0.0
        return "" if loss <= budget + TOLERANCE_DB else f"sharing would cost {loss:.1f} dB, budget {budget:g} dB"
