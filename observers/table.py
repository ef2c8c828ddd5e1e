"""Ranges of a model's tensors by node name, apart from any graph: measured, merged, written by hand, kept in a file.

The JSON is versioned and small enough to be read and edited:

    {"schema": 1, "ranges": {"conv2d": {"min": -1.5, "max": 2.0}, ...}}

A measured entry can carry a histogram, the counts of its bins that are not empty:

    "conv2d": {"min": -1.5, "max": 2.0, "histogram": {"bins": [1033, ...], "counts": [12, ...]}}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from .errors import InputError, MissingRangeError, RangeError
from .estimators import HistogramEstimator, MinMaxEstimator
from .fields import got, require
from .histogram import BINS
from .ranges import Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .estimators import Estimator

SCHEMA: Final = 1
_LARGEST: Final = float(torch.finfo(torch.float32).max)
_MOST: Final = 2**63 - 1  # what a counter holds


@dataclass(frozen=True)
class Entry:
    """What is known of one tensor: its range, and the counts of its histogram's bins (bin -> count), if measured."""

    range: Range
    histogram: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        if max(-self.range.min, self.range.max) > _LARGEST:
            raise RangeError(f"the range {self.range} does not fit float32")

    def merge(self, other: Entry) -> Entry:
        """Return what is known from both."""
        counts: dict[int, int] | None = None
        if self.histogram is not None and other.histogram is not None:
            counts = dict(self.histogram)
            for bin_, count in other.histogram.items():
                counts[bin_] = counts.get(bin_, 0) + count
        return Entry(self.range.union(other.range), counts)

    def estimator(self) -> MinMaxEstimator:
        """Return an estimator in the state that seeing this data would have left it in."""
        if self.histogram is None:
            plain = MinMaxEstimator()
            plain.fill(self.range)
            return plain
        estimator = HistogramEstimator()
        estimator.min_val.fill_(self.range.min)
        estimator.max_val.fill_(self.range.max)
        bins = torch.tensor(list(self.histogram), dtype=torch.int64)
        estimator.counts[bins] = torch.tensor(list(self.histogram.values()), dtype=torch.int64)
        return estimator

    @classmethod
    def of(cls, estimator: Estimator) -> Entry | None:
        """Return what an estimator saw, or None if that is nothing."""
        low, high = float(estimator.min_val), float(estimator.max_val)
        if low > high:
            return None
        if not isinstance(estimator, HistogramEstimator):
            return cls(Range(low, high))
        bins = estimator.counts.nonzero().flatten()
        return cls(Range(low, high), dict(zip(bins.tolist(), estimator.counts[bins].tolist(), strict=True)))


@dataclass(frozen=True)
class RangeTable:
    """Ranges by node name.

    >>> table = RangeTable.of({"x": Range(-1.0, 1.7)}).merge(RangeTable.of({"x": Range(0.0, 2.0)}))
    >>> table["x"].range
    Range(min=-1.0, max=2.0)
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, ranges: Mapping[str, Range | tuple[float, float]]) -> RangeTable:
        """Return a table of ranges written by hand: node name -> `Range` or (min, max).

        Raises:
            InputError: if it is no such mapping.
        """
        if not isinstance(ranges, Mapping):
            raise InputError(f"RangeTable.of takes a mapping of node names to (min, max), {got(ranges)}")
        return cls({name: Entry(_by_hand(name, given)) for name, given in ranges.items()})

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a node.

        Raises:
            MissingRangeError: if the table lacks it; names the nearest entries.
        """
        if name not in self.entries:
            raise MissingRangeError(f"the range table has no entry {name!r}{_near(name, self.entries)}")
        return self.entries[name]

    def __contains__(self, name: object) -> bool:
        """Tell whether the table has an entry for a node."""
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        """Go through the node names."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.entries)

    def merge(self, *others: RangeTable) -> RangeTable:
        """Return the table of all shards: the same as if one run had seen all of their batches."""
        merged = dict(self.entries)
        for other in others:
            require(isinstance(other, RangeTable), "a RangeTable merges with others", other)
            for name, entry in other.entries.items():
                merged[name] = merged[name].merge(entry) if name in merged else entry
        return RangeTable(merged)

    def require(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Make sure that the table has every needed entry, and none for a node that the graph lacks.

        Args:
            names: nodes that need a range.
            known: all nodes of the graph.

        Raises:
            MissingRangeError: naming the nodes, with the nearest names there are.
        """
        missing = [name for name in names if name not in self.entries]
        if missing:
            shown = ", ".join(f"{name!r}{_near(name, self.entries)}" for name in missing[:10])
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise MissingRangeError(
                f"the range table lacks {len(missing)} node(s) that need a range: {shown}{more}; measure them with "
                "observe_ranges (on Arm with quantizer=, for the parts of ops that are taken apart), or write them in"
            )
        nodes = set(known)
        unknown = [name for name in self.entries if name not in nodes]
        if unknown:
            shown = ", ".join(f"{name!r}{_near(name, nodes)}" for name in unknown[:10])
            raise MissingRangeError(f"the range table names {len(unknown)} node(s) that the graph lacks: {shown}")

    def to_json(self) -> str:
        """Return the table as JSON text, one entry a line."""
        lines = [f"  {json.dumps(name)}: {json.dumps(_entry_out(entry))}" for name, entry in self.entries.items()]
        body = ",\n".join(lines)
        return f'{{"schema": {SCHEMA}, "ranges": {{\n{body}\n}}}}\n'

    @classmethod
    def from_json(cls, text: str) -> RangeTable:
        """Read a table.

        Raises:
            InputError: if the text is no JSON, of a newer schema, or not of the form above; says where.
        """
        if not isinstance(text, (str, bytes)):
            raise InputError(f"RangeTable.from_json takes the text of a file, {got(text)}")
        try:
            data = json.loads(text, object_pairs_hook=_once)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"the range table is no JSON: {error}") from None
        except RecursionError:
            raise InputError("the range table is no JSON of ours: it is nested too deeply") from None
        if not isinstance(data, dict) or not isinstance(data.get("ranges"), dict):
            raise InputError('a range table is {"schema": 1, "ranges": {node name: {"min": .., "max": ..}}}')
        if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
            raise InputError(f"the range table has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        return cls({name: _entry_in(name, raw) for name, raw in data["ranges"].items()})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict, if it has no key twice (json keeps the last in silence)."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the range table has {twice!r} twice")
    return found


def _by_hand(name: object, given: object) -> Range:
    """Return a range that a user wrote."""
    if isinstance(given, Range) and isinstance(name, str):
        return given
    fits = isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(name, str)
    if not fits or any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in given):  # type: ignore[attr-defined]
        raise InputError(f"a range table takes node name: (min, max), got {name!r}: {given!r}")
    try:
        return Range(float(given[0]), float(given[1]))  # type: ignore[index]
    except OverflowError as error:
        raise InputError(f"range table, entry {name!r}: {error}") from None


def _entry_out(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"min": entry.range.min, "max": entry.range.max}
    if entry.histogram is not None:
        bins = sorted(entry.histogram)
        found["histogram"] = {"bins": bins, "counts": [entry.histogram[b] for b in bins]}
    return found


def _entry_in(name: str, raw: object) -> Entry:
    where = f'range table, entry "{name}"'
    if not isinstance(raw, dict) or not {"min", "max"} <= set(raw) <= {"min", "max", "histogram"}:
        raise InputError(f'{where}: needs "min" and "max", may have "histogram", got {raw!r}')
    ends = [raw["min"], raw["max"]]
    if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in ends):
        raise InputError(f"{where}: min and max must be numbers, got {ends}")
    histogram = _histogram_in(where, raw["histogram"]) if "histogram" in raw else None
    try:
        return Entry(Range(float(ends[0]), float(ends[1])), histogram)
    except (RangeError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from None


def _histogram_in(where: str, raw: object) -> dict[int, int]:
    if isinstance(raw, dict) and set(raw) == {"bins", "counts"}:
        bins, counts = raw["bins"], raw["counts"]
        lists = isinstance(bins, list) and isinstance(counts, list) and len(bins) == len(counts)
        if (
            lists
            and all(type(b) is int and 0 <= b < BINS for b in bins)
            and all(type(c) is int and 0 < c <= _MOST for c in counts)
            and len(set(bins)) == len(bins)
        ):
            return dict(zip(bins, counts, strict=True))
    raise InputError(
        f'{where}: a histogram is {{"bins": [..], "counts": [..]}}, bins 0..{BINS - 1} once each, counts > 0'
    )


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(found)})" if found else ""
