"""A value that was quantized already is quantized again: directly, or behind ops that only move, pick or join."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch.fx import Node

from ..annotators.blocks import clamp_bounds
from ..annotators.graph import is_float_tensor, op_name
from ..configs.ops import JOINS, MOVEMENT, NO_OPS, POOLS, SELECTS
from ..observers.qparams import sharing_loss_db
from ..observers.ranges import Range
from .findings import Finding, Severity
from .kinds import Kind
from .losses import clipped_part
from .qdq import Facts, finding, is_dequantize, quantized_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .encoding import Encoding

_MOVING: Final = MOVEMENT | NO_OPS | SELECTS | POOLS | {"getitem"}
HAIR_DB: Final = 0.1  # a difference of scales below it is no loss worth a finding
_ALIGNED: Final = 0.22  # what is cut off a range that was widened by as much as `observers.aligning` ever does
CLIPPED: Final = 0.1  # the part of a range that may be cut off without a finding: estimators cut tails


@dataclass(frozen=True)
class Origin:
    """Where a value that is quantized comes from.

    Args:
        path: the ops between the dequantize and the quantize, from the last to the first.
        dequantize: the dequantize above them, or None where the value is float.
        before: its qparams.
        held: the values that it is known to hold: what its qparams represent, within the bounds of what it quantized,
            without the config's headroom.
        is_part: it may hold far less, as it was picked out of a larger tensor with the same qparams.
    """

    path: tuple[Node, ...]
    dequantize: Node | None = None
    before: Encoding | None = None
    held: Range | None = None
    is_part: bool = False


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the requantizations that lose accuracy, or that a backend can't do where they stand."""
    for value, _, encoding in facts.activations:
        if not encoding.is_usable:
            continue
        if op_name(value) in JOINS:
            yield from _join(facts, value, encoding)
            continue
        origin = trace(facts, value)
        if origin.before is None or origin.before.means_the_same(encoding):
            continue
        yield from (_moved if origin.path else _again)(facts, value, origin, encoding)


def trace(facts: Facts, value: Node) -> Origin:
    """Return where a value comes from, going up through ops that move or pick values."""
    path, node = [], value
    while op_name(node) in _MOVING and node.args and isinstance(node.args[0], Node):
        path.append(node)
        node = node.args[0]
    encoding = facts.encoding(node) if is_dequantize(node) else None
    if encoding is None or encoding.axis is not None or not encoding.is_usable:
        return Origin(tuple(path), node if is_dequantize(node) else None)
    limits, headroom, source = encoding.qparams.representable, facts.config.activation.scheme.headroom, node.args[0]
    held = Range(limits.min / headroom, limits.max / headroom)
    quantized = source.args[0] if isinstance(source, Node) and source.args else None
    bounds = clamp_bounds(quantized) if isinstance(quantized, Node) else None
    is_part = any(_picks(each) for each in (*path, quantized) if isinstance(each, Node))
    return Origin(tuple(path), node, encoding, held.clamp(bounds) if bounds else held, is_part)


def _picks(node: Node) -> bool:
    return op_name(node) in SELECTS | POOLS | {"getitem"}


def _losses(origin: Origin, after: Encoding) -> tuple[float, float]:
    """Return what the first quantization lost against the second in dB, and the part of its range now cut off."""
    if origin.before is None or origin.held is None or origin.before.scheme.dtype != after.scheme.dtype:
        return 0.0, 0.0  # from 16 to 8 bits: rescaled by intent, and not everything in range is in use
    limits, step = after.qparams.representable, after.scales[0] / 2
    part = clipped_part(origin.held, type(limits)(limits.min - step, limits.max + step))
    part = 0.0 if origin.is_part else part
    return max(0.0, sharing_loss_db(after.scales[0], origin.before.scales[0])), part


def _numbers(origin: Origin, after: Encoding) -> dict[str, float]:
    loss, part = _losses(origin, after)
    before = origin.before.numbers("before_") if origin.before else {}
    return after.numbers() | before | {"loss_db": loss, "clipped": part}


def _again(facts: Facts, value: Node, origin: Origin, after: Encoding) -> Iterator[Finding]:
    """Find a dequantize that is quantized again at once."""
    loss, part = _losses(origin, after)
    node = quantized_value(value)
    if loss > HAIR_DB:
        yield finding(
            "QM401",
            _severity(facts, loss),
            node,
            f"quantized a second time with finer steps, which restores nothing of the {loss:.1f} dB lost by the first",
            "quantize the value once, with the second qparams; or leave the first float",
            _numbers(origin, after),
        )
    if part > CLIPPED:
        shifted = part <= _ALIGNED and origin.before is not None and origin.before.scales == after.scales
        yield finding(
            "QM402",
            Severity.INFO if shifted else Severity.WARNING,
            node,
            f"requantized to a range that cuts off {part:.0%} of the one before"
            + (" at the same scale, as where one was widened so that nothing is rounded twice" if shifted else ""),
            "let the second range cover the first, or let both share qparams",
            _numbers(origin, after),
        )


def _severity(facts: Facts, loss_db: float) -> Severity:
    """Return how much a loss matters: sharing may cost as much as the config has for it."""
    return Severity.WARNING if loss_db > facts.config.branches.max_root_loss_db else Severity.INFO


def _moved(facts: Facts, value: Node, origin: Origin, after: Encoding) -> Iterator[Finding]:
    """Find ops that only move values, but have other qparams below than above."""
    loss, part = _losses(origin, after)
    lossy = part > CLIPPED or _severity(facts, loss) is Severity.WARNING
    op = origin.path[-1]
    moves = [node for node in origin.path if op_name(node) != "getitem"]
    fails = len(moves) == 1 and op_name(op).removesuffix("_with_indices") in facts.config.limits.equal_sides
    same_dtype = origin.before is not None and origin.before.scheme.dtype == after.scheme.dtype
    if not (fails or same_dtype):
        return
    what = f"{op_name(op)} only moves values, but is quantized otherwise below than above"
    cost = f"; the finer steps below restore nothing of the {loss:.1f} dB lost above" if loss > HAIR_DB else ""
    yield finding(
        "QM501",
        Severity.ERROR if fails else Severity.WARNING if lossy else Severity.INFO,
        value,
        what + (f", which {facts.config.name} can't load" if fails else "") + cost,
        "share the qparams of both sides, or leave the value above float" if loss > HAIR_DB else "share the qparams",
        _numbers(origin, after),
    )


def _join(facts: Facts, join: Node, after: Encoding) -> Iterator[Finding]:
    """Find joins whose operands have other qparams than their output, or are float."""
    fails = op_name(join) in facts.config.limits.equal_sides
    floats = []
    for operand in join.all_input_nodes:
        origin = trace(facts, operand)
        if origin.dequantize is None and is_float_tensor(operand):
            floats.append(operand.name)
        if origin.before is None or origin.before.means_the_same(after):
            continue
        _, part = _losses(origin, after)
        cuts = part > CLIPPED
        wrong = fails and not origin.path
        yield finding(
            "QM502",
            Severity.ERROR if wrong else Severity.WARNING if cuts else Severity.INFO,
            join,
            f"{op_name(join)} joins {operand.name}, whose qparams differ from its output's"
            + (f": {part:.0%} of its range is cut off" if cuts else "")
            + (f"; {facts.config.name} can't load it" if wrong else ""),
            "requantize the operand before the join, or let it share the output's qparams",
            _numbers(origin, after),
        )
    if floats and len(floats) < len(join.all_input_nodes):
        yield finding(
            "QM503",
            Severity.INFO,
            join,
            f"{op_name(join)} joins quantized operands with float ones ({', '.join(floats)}), so that it runs in float",
            "quantize all operands with the output's qparams",
        )


KIND = Kind(
    "requantization",
    {
        "QM401": "a value is quantized a second time with finer steps",
        "QM402": "a value is requantized to a range that cuts off part of the one before",
        "QM501": "an op that only moves values has other qparams below than above",
        "QM502": "a join's operand has other qparams than its output",
        "QM503": "a join of quantized and float operands",
    },
    find,
)
