"""The last step of a resolution: what a backend's pass would hoist over one tensor must be safe to hoist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clusters import TOLERANCE_DB, united
from .rules import Conflict, HoistRule

if TYPE_CHECKING:
    from .plan import Hoist
    from .qparams import QParams
    from .resolution import Resolver


def settle_hoists(resolver: Resolver) -> None:
    """Make the quantize ops below each tensor alike where that is free, and else keep the pass from firing.

    A pass fires only if all the cells are quantized, so one that stays float is enough; and none that was left float
    for one tensor makes another unsafe.
    """
    for hoist in sorted(resolver.plan.hoists, key=lambda hoist: (hoist.where, sorted(hoist.costs))):
        if hoist.rules.hoist is HoistRule.NEVER or not _differ(resolver, hoist):
            continue
        names = sorted(hoist.costs)
        together = united([resolver.clusters[name] for name in names])
        if any(name in resolver.through for name in names):
            together = None
        free = together is not None and together.loss_db() <= hoist.rules.max_sharing_loss_db + TOLERANCE_DB
        if together is not None and free and hoist.rules.partial_groups:
            resolver.merge(together)
        elif hoist.rules.hoist is HoistRule.ALWAYS:
            if together is not None and hoist.rules.conflict is Conflict.UNION:
                resolver.merge(together)
                resolver.notes.setdefault(hoist.where, []).append(
                    "the backend hoists across differing qparams: the branches share the covering range"
                )
                resolver.lossy.add(hoist.where)
            else:
                cheapest = _cheapest(resolver, hoist)
                resolver.floats.add(cheapest)
                resolver.notes.setdefault(hoist.where, []).append(
                    f"the backend hoists across differing qparams: {cheapest} stays float, so that it does not"
                )


def _differ(resolver: Resolver, hoist: Hoist) -> bool:
    """Tell whether all cells are quantized, and not all alike."""
    if any(name not in resolver.clusters or name in resolver.floats for name in hoist.costs):
        return False
    return len({_met(resolver, name) for name in hoist.costs}) > 1


def _met(resolver: Resolver, name: str) -> QParams:
    """Return the qparams that the pass meets first on its way to the cell."""
    return resolver.clusters[resolver.through.get(name, name)].qparams


def _cheapest(resolver: Resolver, hoist: Hoist) -> str:
    """Return the cell whose readers cost least in float, outside the largest group of alike ones."""
    groups: dict[QParams, list[str]] = {}
    for name in hoist.costs:
        groups.setdefault(_met(resolver, name), []).append(name)
    sizes = sorted(len(group) for group in groups.values())
    kept = sizes[-1] if sizes[-1] > sizes[-2] else 0
    candidates = [name for group in groups.values() if len(group) != kept for name in group]
    return min(candidates, key=lambda name: (hoist.costs[name], name))
