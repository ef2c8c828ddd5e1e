"""Which ranges may have one qparams: the fewest groups in which no member loses more than a budget.

A scale is a sum of two parts: what the range needs below 0 and what it needs above 0, in real units per code.
(In a symmetric scheme it is one part, the larger need.) A group's scale is the sum of the largest parts among
its members, and the member whose own sum is the smallest loses most. So a group is within budget exactly if

    max(below) + max(above) <= k * min(below + above),    k = 10 ** (budget / 20)

and grouping is covering points (below, above) with right-angled triangles. The point with the smallest sum,
the *anchor*, must lie in one of them; what else can lie there depends only on where the right edge is. Both
solvers below make this one-dimensional choice again and again: one tries every edge, one takes the best.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import ConfigError
from .qparams import choose_qparams, scale_of, sharing_loss_db

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .qparams import QParams, Scheme
    from .ranges import Range

# How far a ratio of scales may exceed the budget, for the rounding of 10 ** (budget / 20): less than 1e-8 dB.
# Scales are float32, so two that differ are 6e-8 or more apart: a budget of 0 dB still means equal scales.
_RATIO_TOLERANCE: Final = 1e-9
_EXACT_MAX: Final = 16  # points up to which all is tried; the time grows exponentially

_FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127
_FLOAT32_DIGITS: Final = 24
_FLOAT64_EXPONENT_MAX: Final = 300.0
_FLOAT64_ROUNDING: Final = 1e-15


@dataclass(frozen=True)
class QParamGroup:
    """Members that get one, bit-identical, qparams.

    Args:
        members: their ids, in the order in which they were given.
        range: the smallest range that covers all of theirs.
        qparams: what they share.
        losses_db: what sharing costs each member, in dB (`sharing_loss_db`).
    """

    members: tuple[str, ...]
    range: Range
    qparams: QParams
    losses_db: tuple[float, ...]

    @property
    def worst_loss_db(self) -> float:
        """The largest sharing loss of a member, in dB."""
        return max(self.losses_db)


def partition(
    ranges: Mapping[str, Range], scheme: Scheme, max_sharing_loss_db: float, *, partial: bool = True
) -> tuple[QParamGroup, ...]:
    """Cut `ranges` into groups that share qparams, each member losing at most `max_sharing_loss_db`.

    The groups don't depend on the order of `ranges`, and no two of them could be merged within the budget.
    Their number is the least possible for a symmetric scheme, and for up to 16 distinct ranges; beyond that
    seldom more than one above. A tensor that is 0 throughout is exact at any scale and loses nothing in any
    group: it joins the one with the most members (of these, the one with the smallest member).

    Args:
        ranges: member id -> observed range.
        scheme: how all of them are quantized.
        max_sharing_loss_db: the budget, >= 0, in dB; inf puts all in one group.
        partial: False: all in one group or, where one member's loss forbids it, each by itself (members whose
            own qparams are bit-identical still form a group, which has those).

    Returns:
        The groups, in the order of their first members in `ranges`.

    Raises:
        ConfigError: if the budget is negative or NaN.
        RangeError: if a range is too wide for a float32 scale.
    """
    if not max_sharing_loss_db >= 0:
        raise ConfigError(f"max_sharing_loss_db must be >= 0 dB, got {max_sharing_loss_db}")
    points = {name: _point(range_, scheme) for name, range_ in ranges.items() if not _is_zero(range_)}
    cover = _cover(sorted(set(points.values())), _ratio(max_sharing_loss_db))
    if len(cover) > 1 and not partial:
        return _alike(ranges, scheme)
    number = {point: i for i, group in enumerate(cover) for point in group}
    sizes = Counter(number[point] for point in points.values())
    largest = max(sorted(sizes), key=sizes.__getitem__, default=0)
    groups: dict[int, list[str]] = {}
    for name in ranges:
        groups.setdefault(number[points[name]] if name in points else largest, []).append(name)
    return tuple(_shared(group, ranges, scheme) for group in groups.values())


def _shared(members: Sequence[str], ranges: Mapping[str, Range], scheme: Scheme) -> QParamGroup:
    covering = _covering(members, ranges)
    qparams = choose_qparams(covering, scheme)
    losses = tuple(
        0.0 if _is_zero(ranges[name]) else sharing_loss_db(scale_of(ranges[name], scheme), qparams.scale)
        for name in members
    )
    return QParamGroup(tuple(members), covering, qparams, losses)


def _alike(ranges: Mapping[str, Range], scheme: Scheme) -> tuple[QParamGroup, ...]:
    """Group only members whose own qparams are bit-identical, and keep those: nobody loses anything."""
    groups: dict[QParams, list[str]] = {}
    for name, range_ in ranges.items():
        groups.setdefault(choose_qparams(range_, scheme), []).append(name)
    return tuple(
        QParamGroup(tuple(members), _covering(members, ranges), qparams, (0.0,) * len(members))
        for qparams, members in groups.items()
    )


def _covering(members: Sequence[str], ranges: Mapping[str, Range]) -> Range:
    return ranges[members[0]].union(*(ranges[name] for name in members))


def _is_zero(range_: Range) -> bool:
    return range_.min == range_.max == 0.0


class _Point(NamedTuple):
    """A range's own scale as the sum of its two parts; points are sorted by the sum."""

    total: float
    below: float
    above: float
    scale: float  # max(float32(total), eps)


def _point(range_: Range, scheme: Scheme) -> _Point:
    """Return the parts from which `scale_of` makes the scale."""
    scale = scale_of(range_, scheme)
    low, high = min(range_.min, 0.0), max(range_.max, 0.0)
    if not scheme.symmetric:
        codes = scheme.quant_max - scheme.quant_min
        below, above = -low / codes * scheme.headroom, high / codes * scheme.headroom
        return _Point(below + above, below, above, scale)
    zero = scheme.symmetric_zero_point
    codes_above, codes_below = scheme.quant_max - zero, zero - scheme.quant_min
    need = max(high / codes_above if codes_above else 0.0, -low / codes_below if codes_below else 0.0)
    need *= scheme.headroom
    return _Point(need, 0.0, need, scale)


def _ratio(max_loss_db: float) -> float:
    """Return the largest ratio of a group's scale to a member's own."""
    exponent = max_loss_db / 20.0
    return 10.0**exponent * (1.0 + _RATIO_TOLERANCE) if exponent < _FLOAT64_EXPONENT_MAX else math.inf


def _reach(scale: float, ratio: float) -> float:
    """Return the largest sum of parts that, rounded to float32, is at most `ratio` * `scale`.

    That is the midpoint above the last float32 within the limit, if rounding to even takes it down.
    """
    mantissa, exponent = math.frexp(min(scale * ratio, _FLOAT32_MAX))
    last = math.floor(math.ldexp(mantissa, _FLOAT32_DIGITS))
    midpoint = math.ldexp(last + 0.5, exponent - _FLOAT32_DIGITS)
    return midpoint if last % 2 == 0 else math.nextafter(midpoint, 0.0)


def _cover(points: Sequence[_Point], ratio: float) -> list[list[_Point]]:
    """Return groups of `points` (sorted, distinct, not 0) within the budget, as few as can be had fast."""
    cover: list[list[_Point]] = []
    for chunk in _chunks(points, ratio):
        cover += _fewest(chunk, ratio) if len(chunk) <= _EXACT_MAX else _greedy(chunk, ratio)
    return cover


def _chunks(points: Sequence[_Point], ratio: float) -> Iterator[Sequence[_Point]]:
    """Cut at gaps between sums that are wider than the budget: no group can lie on both sides of one."""
    start = 0
    for i in range(1, len(points) + 1):
        if i == len(points) or points[i].total > _reach(points[i - 1].scale, ratio):
            yield points[start:i]
            start = i


def _fewest(points: Sequence[_Point], ratio: float) -> list[list[_Point]]:
    """Return a smallest cover of a few points: dynamic programming over what is left, as bits of a mask."""
    solved: dict[int, tuple[int, ...]] = {0: ()}

    def solve(left: int) -> tuple[int, ...]:
        if left not in solved:
            covers = ((group, *solve(left & ~group)) for group in _choices(points, left, ratio))
            solved[left] = min(covers, key=len)
        return solved[left]

    return [[point for i, point in enumerate(points) if group >> i & 1] for group in solve((1 << len(points)) - 1)]


def _choices(points: Sequence[_Point], left: int, ratio: float) -> list[int]:
    """Return the groups that hold the anchor of the points `left` and can't grow, the largest first."""
    bits = [(1 << i, point) for i, point in enumerate(points) if left >> i & 1]
    anchor = bits[0][1]
    reach = _reach(anchor.scale, ratio)
    groups = {
        sum(bit for bit, point in bits if point.below <= edge and edge + point.above <= reach)
        for edge in {point.below for _, point in bits}
        if anchor.below <= edge and edge + anchor.above <= reach
    }
    largest = [group for group in groups if not any(group != other == group | other for other in groups)]
    return sorted(largest, key=lambda group: (-group.bit_count(), group))


def _greedy(points: Sequence[_Point], ratio: float) -> list[list[_Point]]:
    """Return a small cover of many points: always the largest group that holds the smallest point left.

    No two of them can be merged: together they would have been a choice for the earlier one, and a larger.
    """
    slabs = [_Slab(slab) for slab in _slabs(points, ratio)]
    cover: list[list[_Point]] = []
    for number, slab in enumerate(slabs):
        near = slabs[number : number + 2]
        for anchor in slab.points:
            if anchor in slab:
                group = _largest_group(anchor, near, _reach(anchor.scale, ratio))
                for each in near:
                    each.remove(group)
                cover.append(group)
    return cover


def _slabs(points: Sequence[_Point], ratio: float) -> Iterator[Sequence[_Point]]:
    """Cut into slabs as high as the budget, so that a group lies in its anchor's slab and the next."""
    start = 0
    for i in range(1, len(points) + 1):
        if i == len(points) or points[i].total > _reach(points[start].scale, ratio):
            yield points[start:i]
            start = i


def _largest_group(anchor: _Point, near: Iterable[_Slab], reach: float) -> list[_Point]:
    """Return the largest group that holds `anchor`, by moving the right edge over all that could join it.

    As the edge moves right, points come in from the left and, as the top sinks, others drop out for good.
    """
    slack = reach - anchor.total + reach * _FLOAT64_ROUNDING
    window = [p for slab in near for p in slab.between(anchor.below - slack, anchor.below + slack)]
    window = [p for p in window if max(p.below, anchor.below) + max(p.above, anchor.above) <= reach]
    window.sort(key=lambda p: (p.below, p.total))
    from_top = sorted(window, key=lambda p: (p.above, p.total))
    inside: set[_Point] = set()
    dropped: set[_Point] = set()
    most, best = 0, anchor.below
    for point in window:
        edge = max(point.below, anchor.below)
        while edge + from_top[-1].above > reach:
            dropped.add(from_top[-1])
            inside.discard(from_top.pop())
        if point not in dropped:
            inside.add(point)
        if len(inside) > most:
            most, best = len(inside), edge
    return [p for p in window if p.below <= best and best + p.above <= reach]


class _Slab:
    """Points that are left to cover, found by their part below 0 in all but constant time each."""

    def __init__(self, points: Sequence[_Point]) -> None:
        self.points = points
        self._across = sorted(points, key=lambda p: (p.below, p.total))
        self._belows = [point.below for point in self._across]
        self._place = {point: i for i, point in enumerate(self._across)}
        self._next = list(range(len(points) + 1))  # a point's own place, or a later one once it is removed

    def __contains__(self, point: _Point) -> bool:
        place = self._place.get(point)
        return place is not None and self._next[place] == place

    def between(self, low: float, high: float) -> Iterator[_Point]:
        """Yield the points left with low <= below <= high."""
        place = self._left_from(bisect_left(self._belows, low))
        while place < len(self._across) and self._belows[place] <= high:
            yield self._across[place]
            place = self._left_from(place + 1)

    def remove(self, points: Iterable[_Point]) -> None:
        """Take those of `points` that are here."""
        for point in points:
            if point in self:
                self._next[self._place[point]] += 1

    def _left_from(self, place: int) -> int:
        """Return the first place from `place` on whose point is left; shorten the way for the next search."""
        while self._next[place] != place:
            self._next[place] = self._next[self._next[place]]
            place = self._next[place]
        return place
