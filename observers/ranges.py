"""What is known of a tensor's values: the range that was observed, the bounds that hold for any input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch

from .errors import RangeError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Range:
    """The closed interval [min, max] of one tensor's values, after the estimator.

    >>> Range(-1.0, 1.7).union(Range(0.0, 100.0))
    Range(min=-1.0, max=100.0)

    Raises:
        RangeError: if an end is NaN or infinite, or min > max.
    """

    min: float
    max: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            raise RangeError(f"a range needs finite ends, got [{self.min}, {self.max}]")
        if self.min > self.max:
            raise RangeError(f"a range needs min <= max, got [{self.min}, {self.max}]")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Range:
        """Return the range of a non-empty tensor's values."""
        if tensor.numel() == 0:
            raise RangeError("an empty tensor has no range")
        low, high = torch.aminmax(tensor.detach())
        return cls(float(low), float(high))

    def union(self, *others: Range) -> Range:
        """Return the smallest range that covers this one and the others."""
        return Range(min((self.min, *(o.min for o in others))), max((self.max, *(o.max for o in others))))

    def covers(self, other: Range) -> bool:
        """Tell whether every value of `other` lies in this range."""
        return self.min <= other.min and other.max <= self.max

    def with_zero(self) -> Range:
        """Return the range widened to hold 0, which padding and relu need to be exact."""
        return Range(min(self.min, 0.0), max(self.max, 0.0))

    def clamp(self, bounds: Bounds) -> Range:
        """Return what is left of the range when every value is clamped to `bounds`."""
        return Range(bounds.clamp(self.min), bounds.clamp(self.max))

    def __str__(self) -> str:
        """Return the range as [min, max] with four digits."""
        return f"[{self.min:.4g}, {self.max:.4g}]"


def union(ranges: Iterable[Range]) -> Range:
    """Return the smallest range that covers all of `ranges` (at least one)."""
    return reduce(Range.union, ranges)


@dataclass(frozen=True)
class Bounds:
    """What an activation guarantees of its output, whatever the input; None is unbounded.

    A relu has `Bounds(0.0, None)`, a relu6 `Bounds(0.0, 6.0)`, any other tensor `Bounds()`.
    """

    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        low = -math.inf if self.lower is None else self.lower
        high = math.inf if self.upper is None else self.upper
        if not low <= high:  # which NaN is not, either
            raise RangeError(f"bounds need lower <= upper, got ({self.lower}, {self.upper})")

    def clamp(self, value: float) -> float:
        """Return `value` clamped to the bounds."""
        if self.lower is not None:
            value = max(value, self.lower)
        return value if self.upper is None else min(value, self.upper)

    def then(self, other: Bounds) -> Bounds:
        """Return the bounds of two clamps in a row: this one first, then `other`.

        >>> Bounds(0.0, None).then(Bounds(None, 6.0))
        Bounds(lower=0.0, upper=6.0)
        """
        low = other.lower if self.lower is None else other.clamp(self.lower)
        high = other.upper if self.upper is None else other.clamp(self.upper)
        return Bounds(low, high)

    def widened(self, share: float) -> Bounds:
        """Return the bounds, each end moved outwards by a share of itself."""
        low, high = self.lower, self.upper
        return Bounds(
            None if low is None else low - abs(low) * share, None if high is None else high + abs(high) * share
        )

    @property
    def is_bounded(self) -> bool:
        """Tell whether either end is bounded."""
        return self.lower is not None or self.upper is not None


UNBOUNDED = Bounds()
