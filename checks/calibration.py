"""Calibration: qparams that no data can have led to, or that leave no room for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from ..annotators.blocks import clamp_bounds
from ..annotators.graph import op_name
from ..observers.qparams import sharing_loss_db
from ..observers.ranges import UNBOUNDED, Bounds
from .findings import Finding, Severity
from .kinds import Kind
from .qdq import Facts, finding, is_dequantize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .encoding import Encoding

ABSURD: Final = 1e30  # real units per code: no float32 activation that is meant has such steps
_TINY: Final = float(torch.finfo(torch.float32).tiny)
FLOORS: Final = (
    float(torch.finfo(torch.float32).eps),
    2.0**-12,
    2.0**-16,
)  # of torchao's observers and of backends' quantizers
_NEVER_NEGATIVE: Final = frozenset({"abs", "sigmoid", "exp", "softmax", "sqrt"})
FULL: Final = 0.5  # a channel that uses less than this part of the codes, at the floor, lost resolution to it


def find(facts: Facts) -> Iterator[Finding]:
    """Yield activations and weights whose qparams say that calibration went wrong."""
    for value, quantize, encoding in facts.activations:
        if (broken := _impossible(value, encoding)) is not None:
            yield broken
        else:
            yield from _activation(facts, value, encoding)
            yield from _disagreeing(facts, value, quantize, encoding)
    for node, encoding, codes in facts.weights:
        target = _named(node)
        if (broken := _impossible(target, encoding)) is not None:
            yield broken
        elif codes is not None:
            yield from _weight(facts, target, encoding, codes)


def _named(dequantize: Node) -> Node:
    """Return the op that reads a weight, whose name says more than that of the weight's dequantize."""
    readers = list(dequantize.users)
    return readers[0] if len(readers) == 1 else dequantize


def _impossible(node: Node, encoding: Encoding) -> Finding | None:
    scheme = encoding.scheme
    broken = [s for s in encoding.scales if not (math.isfinite(s) and s >= _TINY)]
    outside = [z for z in encoding.zero_points if not scheme.quant_min <= z <= scheme.quant_max]
    if broken:
        return finding(
            "QM302",
            Severity.ERROR,
            node,
            f"a scale of {broken[0]:.4g} is no step that data can have: NaN, inf or nothing was observed",
            "look for NaN and inf in the calibration data, and observe again",
            encoding.numbers(),
        )
    if max(encoding.scales) > ABSURD:
        return finding(
            "QM307",
            Severity.WARNING,
            node,
            f"a scale of {max(encoding.scales):.4g}: values beyond 1e30 were observed, beside which all others are 0",
            "keep masks and sentinels of huge size out of quantized ops: leave this op float, or use a smaller value",
            encoding.numbers(),
        )
    if outside:
        return finding(
            "QM302",
            Severity.ERROR,
            node,
            f"zero point {outside[0]} is not among the codes {scheme.quant_min}..{scheme.quant_max}",
            "calibrate with an observer of the same codes",
            encoding.numbers(),
        )
    return None


def _activation(facts: Facts, value: Node, encoding: Encoding) -> Iterator[Finding]:
    qparams = encoding.qparams
    numbers = encoding.numbers()
    if qparams.scale == 1.0 and qparams.zero_point == 0 and encoding.scheme.dtype != torch.int32:
        # [0, 255] with unsigned codes has these qparams by right (image bytes).
        unsigned = encoding.scheme.quant_min == 0
        yield finding(
            "QM301",
            Severity.WARNING if unsigned else Severity.ERROR,
            value,
            "scale 1 and zero point 0: its observer saw no data",
            "run calibration batches through the prepared model that reach this op",
            numbers,
        )
    elif (floor := _floor(qparams.scale, facts.config.activation.scheme.eps)) is not None:
        yield finding(
            "QM303",
            Severity.WARNING,
            value,
            f"the scale is the observer's floor {floor:.4g}: the values seen were 0 throughout, or ask for finer steps",
            "check that the calibration data reach this op; for values that are that small, lower the floor (eps)",
            numbers,
        )
    bounds = clamp_bounds(value)
    if bounds is not None:
        left = qparams.representable.clamp(bounds)
        if left.max - left.min < qparams.scale and not _is_one_value(facts, value, encoding):
            yield finding(
                "QM304",
                Severity.ERROR,
                value,
                f"no code is left for what it writes: the representable range {qparams.representable} is clamped to "
                f"{left}",
                "calibrate this output by its own values",
                numbers,
            )


def _is_one_value(facts: Facts, value: Node, encoding: Encoding) -> bool:
    """Tell whether a clamp writes one value only, so that it needs no more than one code."""
    seen = facts.ranges.get(value)
    if seen is not None and seen.range.min == seen.range.max and encoding.qparams.covers(seen.range):
        return True
    bounds, node = UNBOUNDED, value
    while (clamped := _written(node)) is not None and isinstance(node.args[0], Node):
        bounds, node = clamped.then(bounds), node.args[0]
        before = facts.encoding(node) if is_dequantize(node) else None
        if before is not None and before.axis is None and before.is_usable:
            held = before.qparams.representable.clamp(bounds)
            return held.min == held.max
    return bounds.lower is not None and bounds.lower == bounds.upper


def _written(node: Node) -> Bounds | None:
    """Return the bounds of what an op writes, whatever it reads, or None if it has none."""
    return Bounds(0.0, None) if op_name(node) in _NEVER_NEGATIVE else clamp_bounds(node)


def _floor(scale: float, own: float) -> float | None:
    """Return the observers' floor that a scale equals, or None."""
    floors = {own} if own > _TINY else set()
    return next((f for f in {*FLOORS, *floors} if math.isclose(scale, f, rel_tol=1e-6)), None)


def _disagreeing(facts: Facts, value: Node, quantize: Node, encoding: Encoding) -> Iterator[Finding]:
    """Find dequantize ops that read codes with other qparams than those that wrote them."""
    for reader in quantize.users:
        found = facts.encoding(reader) if is_dequantize(reader) else None
        if found is not None and not found.means_the_same(encoding):
            yield finding(
                "QM305",
                Severity.ERROR,
                value,
                "the dequantize reads the codes with other qparams than the quantize wrote them with",
                "give both the same scale, zero point and dtype",
                encoding.numbers() | found.numbers("dequantize_"),
            )


def _weight(facts: Facts, node: Node, encoding: Encoding, codes: torch.Tensor) -> Iterator[Finding]:
    """Find weight channels whose scale is the observer's floor although their values are far smaller."""
    if codes.dtype.is_floating_point or encoding.scheme.dtype == torch.int32 or codes.numel() == 0:
        return
    if encoding.axis is None:
        per_channel = codes.reshape(1, -1)
    elif encoding.axis < codes.dim():
        per_channel = codes.transpose(0, encoding.axis).reshape(codes.shape[encoding.axis], -1)
    else:
        return
    zero = torch.tensor(encoding.zero_points, dtype=torch.int64)
    if not zero.numel() == len(encoding.scales) == per_channel.shape[0]:
        return  # said by the check of weights
    used = (per_channel.to(torch.int64) - zero.reshape(-1, 1)).abs().amax(1).tolist()
    full = max(encoding.scheme.quant_max, -encoding.scheme.quant_min)
    own = facts.config.weight.scheme.eps
    lost = [
        count
        for count, scale in zip(used, encoding.scales, strict=True)
        if count < FULL * full and _floor(scale, own) is not None
    ]
    if not lost:
        return
    dead = sum(1 for count in lost if count == 0)
    numbers = {"channels": float(len(lost)), "of": float(len(used)), "dead": float(dead)}
    if any(lost):
        numbers["loss_db"] = sharing_loss_db(min(c for c in lost if c), full)
    yield finding(
        "QM306",
        # What was 0 from the start lost nothing; and a single number (the epsilon of a norm) is one, if a coarse one.
        Severity.WARNING if any(lost) and codes.numel() > 1 else Severity.INFO,
        node,
        f"{len(lost)} of {len(used)} channels of a constant have the floor for a scale and use few of their codes"
        + (f"; {dead} are 0, or were rounded to 0" if dead else ""),
        "lower the floor of its observer (eps)",
        numbers | encoding.numbers(),
    )


KIND = Kind(
    "calibration",
    {
        "QM301": "scale 1 and zero point 0, the defaults of an observer that saw no data",
        "QM302": "a scale or zero point that no data can lead to",
        "QM303": "an activation's scale is at the floor of its observer",
        "QM304": "an output whose clamp and representable range leave no code",
        "QM305": "a dequantize reads codes with other qparams than they were written with",
        "QM306": "channels of a weight or constant that lost their resolution to the floor of the scale",
        "QM307": "values beyond 1e30 were observed",
    },
    find,
)
