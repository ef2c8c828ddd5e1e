"""One axis for several ranges: where a number lies on it, in percent, and which numbers to write below it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_DECADES: Final = 6  # how far below the largest magnitude the logarithmic axis goes
_APART: Final = 9.0  # percent between two ticks, at least


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, both finite, which holds 0.

    Args:
        low: real units.
        high: real units.
        unit: None for a linear axis; else the magnitude about which it turns from linear to logarithmic.
    """

    low: float
    high: float
    unit: float | None = None

    @classmethod
    def of(cls, ranges: Iterable[tuple[float, float]], *, log: bool = False) -> Axis:
        """Return the axis that holds all of the ranges, and 0."""
        ends = [end for range_ in ranges for end in range_] or [0.0]
        low, high = min([*ends, 0.0]), max([*ends, 0.0])
        if low == high:
            high = low + 1.0
        largest = max(-low, high)
        smallest = min((abs(end) for end in ends if end), default=largest)
        return cls(low, high, max(smallest, largest * 10.0**-_DECADES) if log else None)

    def percent(self, value: float) -> float:
        """Return where a value lies, from 0 at `low` to 100 at `high`."""
        low, high = self._at(self.low), self._at(self.high)
        return 100.0 * (self._at(value) - low) / (high - low)

    def _at(self, value: float) -> float:
        largest = max(-self.low, self.high)  # so that no difference overflows
        if self.unit is None:
            return value / largest
        return math.copysign(math.log10(1.0 + abs(value) / self.unit), value)

    def ticks(self) -> list[float]:
        """Return numbers to write below the axis, 0 among them, none too near another."""
        found = [0.0]
        candidates = self._linear_ticks() if self.unit is None else self._decades()
        for tick in sorted(candidates, key=abs, reverse=True):
            inside = self.low <= tick <= self.high
            if inside and all(abs(self.percent(tick) - self.percent(other)) >= _APART for other in found):
                found.append(tick)
        return sorted(found)

    def _linear_ticks(self) -> list[float]:
        span = self.high / 7.0 - self.low / 7.0
        power = 10.0 ** math.floor(math.log10(span))
        step = next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= span), 10.0 * power)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [index * step for index in range(first, last + 1)]

    def _decades(self) -> list[float]:
        largest, unit = max(-self.low, self.high), self.unit or 1.0
        powers = range(math.floor(math.log10(unit)), math.floor(math.log10(largest)) + 1)
        return [sign * 10.0**power for power in powers for sign in (1.0, -1.0)]
