"""Qparams against ranges that were measured apart (`check(..., ranges=)`): what the values lose to them.

From minimum and maximum alone it can be told how far values lie beyond the codes, over how many codes they spread,
and that nothing but one value was seen. Whether a few outliers take the codes of all others, and what clipping costs,
takes the entry's histogram.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from ..annotators.graph import op_name
from ..observers import histogram
from ..observers.errors import MissingRangeError
from ..observers.qparams import QParams, choose_qparams, sharing_loss_db
from .findings import Finding, Severity
from .kinds import Kind
from .losses import clipped_part, clipping_power
from .program import erased_activation, original_names
from .qdq import Facts, finding, is_dequantize, is_quantize, quantized_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Node

    from ..observers.qparams import Scheme
    from ..observers.ranges import Range
    from ..observers.table import Entry, RangeTable
    from .encoding import Encoding
    from .program import Program

CLIPPED_DB: Final = 0.5  # what clipping may cost without a finding: an estimator draws one range for all that share it
CLIPPED: Final = 0.1  # the part of a range that an estimator may well have cut off on purpose
FEW: Final = 16.0  # codes; what spreads over fewer keeps less than 24 dB of what tells its values apart
OUTLIERS_DB: Final = 3.0  # half a bit, which a range of least squared error would gain
BULK: Final = 99.9  # percent of the values beyond neither end
CONSTANT: Final = 1e-6  # a relative spread that is rounding of float32
SHOWN: Final = 5  # names that a message lists
_TINY: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Served:
    """What one qparams serves: a tensor, or all that share it."""

    encoding: Encoding
    entry: Entry

    @property
    def seen(self) -> Range:
        """The smallest and largest value observed."""
        return self.entry.range

    @property
    def limits(self) -> Range:
        """What the qparams represent."""
        return self.encoding.qparams.representable

    @property
    def scale(self) -> float:
        """Real units per code."""
        return self.encoding.scales[0]

    @property
    def scheme(self) -> Scheme:
        """The codes, symmetric where the qparams are."""
        return replace(self.encoding.scheme, symmetric=self.encoding.is_symmetric)

    @cached_property
    def own(self) -> QParams:
        """The qparams that cover the values observed, and no others."""
        return choose_qparams(self.seen, self.scheme)

    @property
    def coarse_db(self) -> float:
        """How much more noise the qparams make than those that cover the values observed, in dB."""
        return sharing_loss_db(self.own.scale, self.scale)

    @property
    def beyond(self) -> float:
        """How far values lie beyond the codes, in real units."""
        return max(0.0, self.limits.min - self.seen.min, self.seen.max - self.limits.max)

    @property
    def is_constant(self) -> bool:
        """Tell whether one value was seen, but for rounding."""
        return self.seen.max - self.seen.min <= CONSTANT * max(abs(self.seen.min), abs(self.seen.max))

    @cached_property
    def counts(self) -> histogram.Counts | None:
        """The histogram, or None where there is none, or none that tells anything."""
        known = self.entry.histogram
        if not known or max(-self.seen.min, self.seen.max) <= _TINY:
            return None
        counts = np.zeros(histogram.BINS, dtype=np.int64)
        counts[list(known)] = list(known.values())
        return counts

    def noise(self, limits: Range) -> float:
        """Return the expected squared error of quantizing the values to a range, summed over them."""
        if self.counts is None:
            return math.nan
        scheme = replace(self.scheme, symmetric=False)  # the range says where 0 is
        error = histogram.ExpectedError.of(self.counts, self.seen, scheme)
        return float(error(np.array([limits.min]), np.array([limits.max]))[0])


@dataclass(frozen=True)
class Observed:
    """A quantized tensor with one of its qparams, and all tensors that have the very same ones."""

    value: Node
    alone: Served
    shared: Served

    def numbers(self) -> dict[str, float]:
        """Return the numbers that every finding here has."""
        seen = self.alone.seen
        return self.alone.encoding.numbers() | {"observed_min": seen.min + 0.0, "observed_max": seen.max + 0.0}


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the tensors whose observed values their qparams serve badly; nothing where nothing was observed."""
    for each in compared(facts):
        alone = each.alone
        if alone.is_constant:
            yield from _dead(each)
        elif alone.beyond > alone.scale:  # by a step: where codes end at 255/256, a value of 1.0 is no finding
            yield from _saturated(facts, each)
        else:
            yield from _few_codes(facts, each)


def compared(facts: Facts) -> list[Observed]:
    """Return the quantized tensors of which something was observed, with each of their qparams once."""
    found: dict[tuple[Node, object], Served] = {}
    together: dict[object, Entry] = {}
    for value, _, encoding in facts.activations:
        node = value
        while is_dequantize(node) and (source := quantized_value(node)) is not node:
            node = source
        key = (encoding.scales, encoding.zero_points, encoding.scheme)
        entry = facts.ranges.get(node)
        if entry is not None and encoding.is_usable and (node, key) not in found:
            found[node, key] = Served(encoding, entry)
            together[key] = together[key].merge(entry) if key in together else entry
    return [Observed(node, alone, Served(alone.encoding, together[key])) for (node, key), alone in found.items()]


def entries_of(nodes: Sequence[Node], table: RangeTable) -> dict[Node, Entry]:
    """Return what a table of the float model knows of a graph's nodes.

    A node is known by the name that it had at the first export, since backends trace graphs anew and so give old names
    to other nodes; of several that one op was taken apart into, the last has its value.
    """
    past = {node: original_names(node) for node in nodes if not (is_quantize(node) or is_dequantize(node))}
    owners = {names[0]: node for node, names in past.items()}
    owners |= {names[0]: node for node, names in past.items() if "from_node" in node.meta}  # not named so by chance
    found: dict[Node, Entry] = {}
    for node, names in past.items():
        meant = names[:1] if erased_activation(node) else names
        mine = [name for name in meant if name in table and owners.get(name, node) is node]
        if mine:
            found[node] = table[mine[0]]
    return found


def unknown(table: RangeTable, programs: Sequence[Program], *, rewritten: bool) -> Iterator[Finding]:
    """Find entries for nodes that none of the graphs has: the table is stale, or of another model.

    `rewritten` graphs are those that a backend's own package has traced anew.

    Raises:
        MissingRangeError: if no entry is for a node of the graphs.
    """
    nodes = [node for program in programs for node in program.model.graph.nodes if node.op != "output"]
    known = {name for node in nodes for name in original_names(node)}
    names = [name for name in table if name not in known]
    if not names:
        return
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    if len(names) == len(table):
        raise MissingRangeError(
            f"no entry of the range table is for a node of the checked model (it names {shown}): measure one with "
            "observe_ranges, on the float model that was quantized"
        )
    yield finding(
        "QM313",
        Severity.INFO if rewritten else Severity.WARNING,  # which takes ops apart without a trace of some
        nodes[-1],
        f"{len(names)} of {len(table)} entries of the range table are for nodes that the graph lacks: {shown}",
        "measure the ranges again, on the float model that was quantized",
        {"unknown": float(len(names)), "entries": float(len(table))},
    )


def _gain_db(noise: float, least: float) -> float:
    return 10.0 * math.log10(noise / least) if noise > 0.0 < least else 0.0


def _dead(each: Observed) -> Iterator[Finding]:
    """Find tensors of which one value only was seen."""
    alone = each.alone
    zero, lost = alone.seen.min == alone.seen.max == 0.0, alone.beyond > alone.scale
    if zero:
        what, mend = "every value observed was 0", "if nothing ever reaches this op, take it out of the model"
    else:
        what, mend = f"every value observed was {alone.seen.max:.4g}", "what is constant can be a buffer"
    yield finding(
        "QM311",
        Severity.WARNING if zero or lost else Severity.INFO,
        each.value,
        what + (f", which is not among the values represented, {alone.limits}" if lost else ""),
        f"check that the calibration data reach this op and vary; {mend}",
        each.numbers() | ({"beyond": alone.beyond} if lost else {}),
    )


def _saturated(facts: Facts, each: Observed) -> Iterator[Finding]:
    """Find values beyond the codes, unless cutting them off lowers the error: then an estimator meant it."""
    alone, shared, estimator = each.alone, each.shared, facts.config.activation.estimator
    part = clipped_part(alone.seen, alone.limits)
    if shared.counts is not None:
        loss = _gain_db(shared.noise(shared.limits), shared.noise(shared.own.representable))
        if loss <= CLIPPED_DB or (facts.given and estimator == "percentile"):
            return
        told, severity = f"at {loss:.1f} dB more noise than if they were covered", Severity.WARNING
    elif part <= CLIPPED:
        return
    else:
        cut = clipping_power(alone.seen, alone.limits)
        loss = _gain_db(cut + alone.scale**2 / 12.0, alone.own.scale**2 / 12.0)
        told = f"{part:.0%} of the range: {loss:.1f} dB more noise if values are spread evenly (there is no histogram)"
        severity = Severity.INFO if facts.given and estimator != "minmax" else Severity.WARNING
    yield finding(
        "QM308",
        severity,
        each.value,
        f"values in {alone.seen} were observed, but only {alone.limits} is represented: up to {alone.beyond:.4g} is "
        f"cut off, {told}",
        'calibrate with data like those of the range table, or with estimator="minmax", which covers all values',
        each.numbers() | {"beyond": alone.beyond, "clipped": part, "loss_db": loss},
    )


def _few_codes(facts: Facts, each: Observed) -> Iterator[Finding]:
    """Find the one reason for which values that are all represented have few codes."""
    alone, low, high = each.alone, each.alone.seen.min, each.alone.seen.max
    if not low <= 0.0 <= high and (high - low) / alone.own.scale < FEW:
        codes = (high - low) / alone.scale
        kept = max(0.0, 20.0 * math.log10(codes))
        yield finding(
            "QM310",
            Severity.WARNING,
            each.value,
            f"the values observed lie in {alone.seen}, far from 0, which must have a code: {codes:.1f} steps are left "
            f"to tell them apart, which keeps {kept:.0f} dB of their differences",
            "take an offset off before this op and add it behind, use 16-bit activations, or leave the op float",
            each.numbers() | {"codes": codes, "kept_db": kept},
        )
        return
    limit = facts.config.branches.max_root_loss_db + _headroom_db(facts)
    fixed = op_name(each.value) in {rule.op for rule in facts.config.ops.fixed}
    if alone.coarse_db > limit and not fixed:
        shares = each.shared.coarse_db <= limit
        yield finding(
            "QM312",
            Severity.INFO if shares else Severity.WARNING,  # what shares was decided to, and had its price named
            each.value,
            f"the values observed lie in {alone.seen}, but the codes are spread over {alone.limits}: "
            f"{alone.coarse_db:.1f} dB more noise than with qparams of their own"
            + (", which it shares with larger tensors" if shares else ""),
            "let it share qparams with none that is so much larger, or leave it float"
            if shares
            else "calibrate with data like those of the range table",
            each.numbers() | {"loss_db": alone.coarse_db},
        )
        return
    yield from _outliers(each, OUTLIERS_DB + _headroom_db(facts))


def _headroom_db(facts: Facts) -> float:
    """Return what the config spends on values that calibration did not see."""
    return 20.0 * math.log10(facts.config.activation.scheme.headroom)


def _outliers(each: Observed, limit_db: float) -> Iterator[Finding]:
    """Find tensors in which a few values take the codes of all others."""
    served = each.shared
    if served.counts is None:
        return
    best = histogram.search(served.counts, served.seen, served.scheme)
    gain = _gain_db(served.noise(served.limits), served.noise(choose_qparams(best, served.scheme).representable))
    most = histogram.percentile(_but_zeros(served.counts), served.seen, BULK).with_zero()
    codes = (most.max - most.min) / served.scale
    numbers = each.numbers() | {"bulk_min": most.min, "bulk_max": most.max, "bulk_codes": codes}
    if gain > limit_db:
        yield finding(
            "QM309",
            Severity.WARNING,
            each.value,
            f"outliers dominate the range {served.limits}: {best} would have {gain:.1f} dB less noise",
            'calibrate with estimator="histogram", or "percentile" if wild values carry nothing',
            numbers | {"loss_db": gain},
        )
    elif codes < FEW:
        yield finding(
            "QM309",
            Severity.INFO,
            each.value,
            f"nearly all values that are not 0 ({BULK} % at each end) lie in {most} and share {codes:.1f} steps; the "
            "few others are so large that cutting them off would cost more",
            'calibrate with estimator="percentile" if they carry nothing, or use 16-bit activations',
            numbers,
        )


def _but_zeros(counts: histogram.Counts) -> histogram.Counts:
    """Return the counts without those of the bins that hold 0."""
    rest = counts.copy()
    rest[[0, histogram.BINS // 2]] = 0
    return rest


KIND = Kind(
    "observed ranges",
    {
        "QM308": "observed values lie beyond what the qparams represent",
        "QM309": "a few outliers take the codes of all other values",
        "QM310": "values in a band far from 0 have few codes",
        "QM311": "one value only was observed: the tensor is dead, or calibration does not vary it",
        "QM312": "the qparams represent far more than was observed",
        "QM313": "the range table names nodes that the graph lacks",
    },
    find,
)
