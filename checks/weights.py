"""Weights: channels along the axis that an integer kernel can scale by, in a form that the backend takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from ..annotators.graph import argument, op_name, rank
from .findings import Finding, Severity
from .kinds import Kind
from .qdq import Facts, Head, finding, head_names

if TYPE_CHECKING:
    from collections.abc import Iterator


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the weights with scales that no kernel can apply."""
    for head in facts.heads:
        encoding = head.weight.encoding
        if encoding is None:
            continue
        if encoding.axis is not None:
            yield from _axis(facts, head)
        if facts.given and not facts.config.weight.allow_affine:
            points = [z for z in encoding.zero_points if z != encoding.scheme.symmetric_zero_point]
            if points:
                yield finding(
                    "QM903",
                    Severity.ERROR,
                    head.node,
                    f"the weight has zero point {points[0]}, but {facts.config.name} takes symmetric weights only",
                    "quantize weights with a symmetric scheme",
                    encoding.numbers(),
                )


def _axis(facts: Facts, head: Head) -> Iterator[Finding]:
    encoding, wanted = head.weight.encoding, head.rule.channel_axis
    axis = axis_as_read(head)
    if encoding is None or axis is None:
        return
    shape = facts.shape(head.weight.value)
    if axis != wanted:
        yield finding(
            "QM901",
            Severity.ERROR,
            head.node,
            f"the weight is scaled along axis {axis}, but output channels run along axis {wanted}: products with "
            "different scales would be added before they are rescaled",
            f"quantize the weight per channel along axis {wanted}, or per tensor",
            {"axis": float(axis), "channel_axis": float(wanted)},
        )
    elif axis < len(shape) and shape[axis] not in {-1, len(encoding.scales)}:
        yield finding(
            "QM902",
            Severity.ERROR,
            head.node,
            f"the weight has {len(encoding.scales)} scales for {shape[axis]} channels",
            "quantize the weight again, as it is now",
            {"scales": float(len(encoding.scales)), "channels": float(shape[axis])},
        )
    grouped = head.rule.transposed and argument(head.node, "groups") not in {1, None}
    names = head_names(head.node) if "linear" not in facts.config.blocks.heads else {op_name(head.node)}
    listed = facts.config.blocks.per_tensor_heads
    if facts.given and (names & listed or (grouped and "grouped_transposed" in listed)):
        yield finding(
            "QM904",
            Severity.ERROR,
            head.node,
            f"the weight has one scale per channel, but {facts.config.name} takes one per tensor in this op",
            "quantize this weight per tensor",
            encoding.numbers(),
        )


def axis_as_read(head: Head) -> int | None:
    """Return the axis of the weight's channels as the head reads it, behind permutes; None where that is unknown."""
    encoding = head.weight.encoding
    if encoding is None or encoding.axis is None:
        return None
    moves, node = [], head.weight.value
    while node is not head.weight.dequantize and isinstance(node.args[0], Node):
        moves.append(node)
        node = node.args[0]
    axis: int | None = encoding.axis
    for move in reversed(moves):
        axis = None if axis is None else _moved_axis(move, axis)
    return axis


def _moved_axis(node: Node, axis: int) -> int | None:
    name, dims = op_name(node), rank(node)
    if name in {"t", "numpy_T"} and dims == 2:
        return 1 - axis
    if name == "transpose":
        pair = [int(argument(node, key)) % dims for key in ("dim0", "dim1")]  # type: ignore[arg-type]
        return pair[1 - pair.index(axis)] if axis in pair else axis
    if name == "permute":
        order = [int(dim) % dims for dim in argument(node, "dims")]  # type: ignore[arg-type, union-attr]
        return order.index(axis)
    return axis if name in {"clone", "contiguous", "detach", "alias", "lift_fresh"} else None


KIND = Kind(
    "weights",
    {
        "QM901": "a weight has scales along another axis than the output channels'",
        "QM902": "a weight has another number of scales than channels",
        "QM903": "a weight has a zero point on a backend that takes symmetric weights only",
        "QM904": "a weight has one scale per channel where the backend takes one per tensor",
    },
    find,
)
