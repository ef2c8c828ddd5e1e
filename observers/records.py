"""What was decided about a family or join, kept until all is decided and then told as a `Decision`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .rules import Decision, JoinOutcome, Outcome, TensorOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .plan import Family, Hoist, Join
    from .resolution import Resolver

_SLIGHT_DB: Final = 0.5  # a loss that needs no words


@dataclass
class FamilyRecord:
    """The outcome taken for a family, its cells (root first), and why better outcomes were not taken."""

    family: Family
    outcome: Outcome
    cells: list[str]
    rejected: list[tuple[str, str]]
    over: str

    def decision(self, resolver: Resolver) -> Decision:
        """Return the record as it stands after all was decided."""
        leaves = [name for name in dict.fromkeys(leaf.cell for leaf in self.family.leaves) if name in self.cells]
        quantized = [name for name in leaves if name not in resolver.floats]
        groups = _groups(resolver, quantized)
        losses = {name: resolver.final_loss_db(name) for name in quantized}
        worst = max(losses.values(), default=0.0)
        if self.outcome is Outcome.SHARED and len(groups) == 1:
            reason = f"one qparams cost no branch more than {worst:.2f} dB"
        else:
            reason = f"{len(groups)} qparam group(s), no branch loses more than {worst:.2f} dB by sharing"
        if self.over:
            reason += f"; the least lossy of what is legal: {self.over}"
        where = self.family.where
        return Decision(
            "branches",
            where,
            self.outcome,
            groups,
            _ranges(resolver, self.cells),
            tuple(losses.items()),
            reason,
            tuple(self.rejected),
            bool(self.over) or where in resolver.lossy,
            tuple(resolver.notes.get(where, ())),
        )


@dataclass
class TensorRecord:
    """A tensor that stays float by itself, because no qparams describe its range."""

    cell: str
    why: str

    def decision(self, resolver: Resolver) -> Decision:
        """Return the record as a decision."""
        seen = resolver.ranges[self.cell]
        ranges = ((self.cell, (seen.min, seen.max)),)
        where = resolver.plan.cells[self.cell].where
        return Decision("tensor", where, TensorOutcome.FLOAT, (), ranges, (), self.why, finding=True)


@dataclass
class HoistRecord:
    """What was done for the sake of a hoist above a tensor that is no family's root."""

    hoist: Hoist

    def decision(self, resolver: Resolver) -> Decision:
        """Return the record as it stands after all was decided."""
        where, cells = self.hoist.where, list(self.hoist.costs)
        quantized = [name for name in cells if name not in resolver.floats]
        losses = tuple((name, resolver.final_loss_db(name)) for name in quantized)
        return Decision(
            "branches",
            where,
            Outcome.INDEPENDENT,
            _groups(resolver, quantized),
            _ranges(resolver, cells),
            losses,
            "its quantized readers differ",
            (),
            where in resolver.lossy,
            tuple(resolver.notes[where]),
        )


@dataclass
class JoinRecord:
    """What was decided about a join: why it is float, or which operands keep their own qparams and why."""

    join: Join
    finding: bool = False
    why_float: str = ""
    apart: dict[str, str] = field(default_factory=dict)
    contradicting: set[str] = field(default_factory=set)  # of those apart: their contract forbids the join's qparams
    aligned: set[str] = field(default_factory=set)  # of those: they have the join's scale, so that no value is rounded
    unfolded: set[str] = field(default_factory=set)  # they share, for which their activation is an op of its own

    def decision(self, resolver: Resolver) -> Decision:
        """Return the record as it stands after all was decided."""
        output = self.join.output
        operands = list(dict.fromkeys(i.cell for i in self.join.inputs if i.cell in resolver.clusters))
        quantized = [name for name in operands if name not in resolver.floats]
        if output in resolver.floats:
            outcome, reason = JoinOutcome.FLOAT, self.why_float or "its output stays float for the sake of its branches"
            groups: tuple[tuple[str, ...], ...] = _groups(resolver, quantized)
            losses = dict.fromkeys(operands, 0.0)
        else:
            shared = JoinOutcome.UNFOLD if self.unfolded else JoinOutcome.SHARED
            outcome = JoinOutcome.REQUANTIZE if self.apart else shared
            groups = _groups(resolver, [output, *quantized])
            scale = resolver.clusters[output].qparams.scale
            losses = {name: resolver.loss_db(name, scale) for name in operands}
            why = [f"{cell} keeps {self._what(cell)}: {why}" for cell, why in self.apart.items()]
            why += [f"{cell} shares, its activation an op of its own" for cell in sorted(self.unfolded)]
            reason = "; ".join(why) or self._why_shared(losses)
        return Decision(
            "join",
            self.join.where,
            outcome,
            groups,
            _ranges(resolver, [output, *operands]),
            tuple(losses.items()),
            reason,
            (),
            self.finding,
        )

    def _what(self, cell: str) -> str:
        return "its own zero point, at the join's scale" if cell in self.aligned else "its own qparams"

    def _why_shared(self, losses: dict[str, float]) -> str:
        """Return why one qparams serve all, and what a loss means that sounds large: the output is as coarse."""
        cell = max(losses, key=lambda name: losses[name], default="")
        if not cell or losses[cell] < _SLIGHT_DB:
            return "one qparams serve all"
        coarse = f"{cell} is {losses[cell]:.1f} dB coarser than alone"
        if self.finding:
            return f"one qparams serve all, because quantized ops read the output; {coarse}"
        return f"one qparams serve all; {coarse}, as the output is that it becomes a part of"


def _groups(resolver: Resolver, names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(id(resolver.clusters[name]), []).append(name)
    return tuple(tuple(group) for group in found.values())


def _ranges(resolver: Resolver, names: Iterable[str]) -> tuple[tuple[str, tuple[float, float]], ...]:
    return tuple((name, (resolver.ranges[name].min, resolver.ranges[name].max)) for name in names)
