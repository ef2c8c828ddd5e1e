"""The qparams that a quantize or dequantize node carries."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..observers.qparams import QParams

if TYPE_CHECKING:
    from ..observers.qparams import Scheme


@dataclass(frozen=True)
class Encoding:
    """The qparams that a quantize or dequantize carries: one scale and zero point, or one each per channel.

    Args:
        scales: real units per code.
        zero_points: the codes of 0.
        scheme: codes and dtype (`symmetric` and `eps` are not known from a graph, and say nothing).
        axis: the axis that the channels run over, or None for one scale per tensor.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    scheme: Scheme
    axis: int | None = None

    @property
    def qparams(self) -> QParams:
        """The qparams of a tensor with one scale (of the first channel, where there are several)."""
        return QParams(self.scales[0], self.zero_points[0], self.scheme)

    @property
    def is_usable(self) -> bool:
        """Tell whether every scale is a positive finite number, so that it can be reckoned with."""
        return all(math.isfinite(scale) and scale > 0.0 for scale in self.scales)

    @property
    def is_symmetric(self) -> bool:
        """Tell whether every zero point is the middle code (0 where the dtype is signed), but not the first."""
        middle = self.scheme.symmetric_zero_point
        return all(point == middle > self.scheme.quant_min for point in self.zero_points)

    def means_the_same(self, other: Encoding) -> bool:
        """Tell whether a code stands for the same value in both (the codes that may be used can differ)."""
        return (
            tuple(map(_float32, self.scales)) == tuple(map(_float32, other.scales))
            and self.zero_points == other.zero_points
            and (self.scheme.dtype, self.axis) == (other.scheme.dtype, other.axis)
        )

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Return scale and zero point for a finding; of several channels, the smallest and largest scale."""
        if len(self.scales) == 1:
            return {f"{prefix}scale": self.scales[0], f"{prefix}zero_point": float(self.zero_points[0])}
        return {f"{prefix}scale_min": min(self.scales), f"{prefix}scale_max": max(self.scales)}


def _float32(value: float) -> float:
    return ctypes.c_float(value).value
