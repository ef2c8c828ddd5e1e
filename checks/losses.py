"""What passing values through other qparams costs, predicted from the qparams alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..observers.qparams import QParams
    from ..observers.ranges import Range


def detour_loss_db(own: QParams, other: QParams) -> float:
    """Return by how many dB the noise grows if values pass `other` before they are quantized by `own`.

    The values are taken to be spread evenly over what `own` represents: rounding to a step s adds s**2 / 12
    (Bennett 1948), and what lies outside of `other`'s range is cut off. Never less than 0.
    """
    noise = own.scale**2 / 12.0
    rounding = 0.0 if own.scale == other.scale else other.scale**2 / 12.0
    return 10.0 * math.log10((noise + rounding + clipping_power(own.representable, other.representable)) / noise)


def clipping_power(values: Range, limits: Range) -> float:
    """Return the mean square error of clamping values, spread evenly over a range, to `limits`."""
    span = values.max - values.min
    if span <= 0.0:
        return 0.0
    below = max(0.0, limits.min - values.min) ** 3 - max(0.0, limits.min - values.max) ** 3
    above = max(0.0, values.max - limits.max) ** 3 - max(0.0, values.min - limits.max) ** 3
    return (below + above) / (3.0 * span)


def clipped_part(values: Range, limits: Range) -> float:
    """Return the part of a range, 0 to 1, that lies outside of `limits`."""
    span = values.max - values.min
    if span <= 0.0:
        return 0.0
    kept = min(values.max, limits.max) - max(values.min, limits.min)
    return 1.0 - max(0.0, kept) / span
