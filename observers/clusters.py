"""Clusters: cells that end up with one qparams, and whether two clusters may become one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from .qparams import QParams, choose_qparams, coarser_qparams, scale_of, sharing_loss_db
from .ranges import UNBOUNDED, Bounds, Range, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .plan import Cell
    from .qparams import Scheme

TOLERANCE_DB: Final = 1e-6
"""How far a loss may exceed its budget, for the rounding of logarithms."""


@dataclass(eq=False)
class Cluster:
    """Cells with one qparams.

    Args:
        members: the names of the cells.
        range: covers every member's.
        scheme: of all of them.
        contracts: the bounds that the qparams have to honour.
        floor: the smallest scale that a member would have if it did not share, in real units per code.
        fixed: qparams that the backend dictates, or None.
        scale: a scale larger than the range needs, taken for the sake of a neighbour (see `aligning`), or None.
    """

    members: list[str]
    range: Range
    scheme: Scheme
    contracts: frozenset[Bounds]
    floor: float
    fixed: QParams | None = None
    scale: float | None = None

    @classmethod
    def of(cls, cell: Cell, range_: Range) -> Cluster:
        """Return the cluster of one cell by itself."""
        floor = own_scale(cell, range_) if is_spread(range_) else math.inf
        return cls([cell.name], range_, cell.scheme, frozenset({cell.contract}), floor, cell.fixed)

    @cached_property
    def qparams(self) -> QParams:
        """What the members share."""
        if self.fixed is not None:
            return self.fixed
        own = choose_qparams(self.range, self.scheme, self._bounds())
        if self.scale is not None and self.scale > own.scale:
            return coarser_qparams(self.range, self.scheme, self._bounds(), self.scale)
        return own

    def with_headroom(self, headroom: float) -> QParams:
        """Return what the members share where they may have so much headroom at most."""
        if self.fixed is not None or self.scale is not None:
            return self.qparams
        return choose_qparams(self.range, self.scheme, self._bounds(), headroom)

    def _bounds(self) -> Bounds:
        """Return the bounds to clamp the range to: those of all members, where they take nothing away."""
        if len(self.contracts) == 1:
            return next(iter(self.contracts))
        lower = max((b.lower for b in self.contracts if b.lower is not None), default=None)
        upper = min((b.upper for b in self.contracts if b.upper is not None), default=None)
        if lower is not None and upper is not None and lower > upper:
            return UNBOUNDED
        both = Bounds(lower, upper)
        return both if self.range.clamp(both) == self.range else UNBOUNDED

    def loss_db(self) -> float:
        """Return what sharing costs the member that it costs most, in dB."""
        return sharing_loss_db(self.floor, self.qparams.scale) if math.isfinite(self.floor) else 0.0


def united(clusters: Sequence[Cluster], *, dictated: bool = False) -> Cluster | None:
    """Return one cluster instead of several, or None if no qparams serve all.

    `dictated`: fixed qparams need not cover the other members, because these are parts of the fixed one's tensor.
    """
    distinct = list(dict.fromkeys(clusters))
    if len(distinct) == 1:
        return distinct[0]
    first = distinct[0]
    fixed = {cluster.fixed for cluster in distinct if cluster.fixed}
    if len(fixed) > 1 or any(cluster.scheme != first.scheme for cluster in distinct):
        return None
    both = Cluster(
        [name for cluster in distinct for name in cluster.members],
        union(cluster.range for cluster in distinct),
        first.scheme,
        frozenset().union(*(cluster.contracts for cluster in distinct)),
        min(cluster.floor for cluster in distinct),
        next(iter(fixed), None),
        max((cluster.scale for cluster in distinct if cluster.scale is not None), default=None),
    )
    kept = all(both.qparams.honours(bounds) for bounds in both.contracts)
    return both if kept and ((dictated and both.fixed) or both.qparams.covers(both.range)) else None


def own_scale(cell: Cell, range_: Range) -> float:
    """Return the scale that the cell would have by itself, in real units per code."""
    headroom = 1.0 if cell.contract.is_bounded else None
    return cell.fixed.scale if cell.fixed else scale_of(range_.clamp(cell.contract), cell.scheme, headroom)


def is_spread(range_: Range) -> bool:
    """Tell whether the tensor holds anything but 0, which is exact at any scale."""
    return range_.min != 0.0 or range_.max != 0.0


def wide_qparams(range_: Range, scheme: Scheme, contracts: Iterable[Bounds]) -> QParams | None:
    """Return the qparams of a widened root: those of `scheme` or, where that takes it, of its half from 0 up.

    None if neither honours the contracts.
    """
    for each in (scheme, scheme.one_sided()) if scheme.symmetric else (scheme,):
        cluster = Cluster([], range_, each, frozenset(contracts), math.inf)
        if all(cluster.qparams.honours(bounds) for bounds in cluster.contracts):
            return cluster.qparams
    return None
