"""Lay a graph out as rows in graph order, with its tensors as lanes beside them: so that no two labels can meet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Placed:
    """One thing of a graph, with its place.

    Args:
        name: of it.
        row: from 0, from above.
        lane: from 0, from the left.
        sources: the things above that it reads.
        last: the row of the last one that reads it, its own if there is none.
    """

    name: str
    row: int
    lane: int
    sources: tuple[str, ...]
    last: int


def lay_out(things: Sequence[tuple[str, Iterable[str]]], rows: Mapping[str, int]) -> dict[str, Placed]:
    """Place things in lanes: each keeps its lane free from its own row to that of the last one that reads it.

    Args:
        things: (name, names of what it reads) in an order in which everything comes after what it reads; what comes
            later, or not at all, is passed over.
        rows: the row of each thing, growing in that order.
    """
    sources: dict[str, tuple[str, ...]] = {}
    for name, reads in things:
        sources[name] = tuple(each for each in dict.fromkeys(reads) if each in sources)
    last = {source: rows[name] for name, found in sources.items() for source in found}
    waiting = Counter(source for found in sources.values() for source in found)
    lanes: list[str | None] = []
    lane_of: dict[str, int] = {}
    for name, found in sources.items():
        freed = []
        for source in found:
            waiting[source] -= 1
            if not waiting[source]:
                freed.append(lane_of[source])
                lanes[lane_of[source]] = None
        lane = min(freed) if freed else lanes.index(None) if None in lanes else len(lanes)
        if lane == len(lanes):
            lanes.append(None)
        lane_of[name] = lane
        if waiting[name]:
            lanes[lane] = name
    return {
        name: Placed(name, rows[name], lane_of[name], found, last.get(name, rows[name]))
        for name, found in sources.items()
    }
