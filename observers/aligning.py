"""Requantizing at a join's edge without rounding twice.

    relu, [0, 5.4]: scale 0.0212, zero_point -128 --+
                                                    cat, [-0.6, 5.4]: scale 0.0235, zero_point -102
    conv, [-0.6, 0.6] ------------------------------+

An operand that can't share a join's qparams is rounded to its own scale, and again to the join's. With scales this near
each other the second rounding is nearly as large as the first. If the finer takes the coarser's scale, each keeping its
own zero point, the second rounding is exact: codes are shifted, nothing more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from .qparams import sharing_loss_db

if TYPE_CHECKING:
    from .clusters import Cluster
    from .resolution import Resolver


def align_joins(resolver: Resolver) -> None:
    """Give an operand and its join one scale, where that saves more at the edge than it costs elsewhere.

    With one scale they can have one zero point too, where the operand's activation may be an op of its own: the same
    values, and no requantize.
    """
    for join in resolver.plan.joins:
        record = resolver.joins.get(id(join))
        if record is None or join.output in resolver.floats:
            continue
        for operand in sorted(record.contradicting - resolver.floats):
            mine, its = resolver.clusters[operand], resolver.clusters[join.output]
            finer, coarser = sorted((mine, its), key=lambda cluster: cluster.qparams.scale)
            scale = coarser.qparams.scale
            if mine is its or resolver.through.keys() & {*mine.members, *its.members} or not _pays(finer, scale):
                continue
            one = resolver.unfolded(join, operand)
            if one is not None and all(_pays(each, one.qparams.scale) for each in (mine, its)):
                resolver.merge(one)
                record.unfolded.add(operand)
                del record.apart[operand]
            elif (aligned := _aligned(finer, scale)) is not None:
                resolver.merge(aligned)
                record.aligned.add(operand)


def _pays(finer: Cluster, scale: float) -> bool:
    """Tell whether a coarser scale saves more at the edge than it costs the finer's other readers.

    Behind two roundings the noise at the edge is finer**2 + scale**2, where it could be scale**2 (see
    `sharing_loss_db`); the finer's other readers pay 20*log10(scale / finer). Both are even at a ratio of 1.27.
    """
    own = finer.qparams.scale
    saved = 10.0 * math.log10(1.0 + (own / scale) ** 2)
    return not finer.scheme.symmetric and finer.fixed is None and saved > sharing_loss_db(own, scale)


def _aligned(finer: Cluster, scale: float) -> Cluster | None:
    """Return the cluster with a coarser scale, or None where it has it, or that breaks what it has to honour."""
    if finer.qparams.scale == scale:
        return None
    found = replace(finer, scale=scale)
    return found if all(found.qparams.honours(bounds) for bounds in found.contracts) else None
