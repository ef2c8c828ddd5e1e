"""What several annotators ask of the same nodes of a graph, each asked once."""

from __future__ import annotations

from torch.fx import Node

from ..configs.ops import HEADS
from .graph import argument, is_float_tensor, numel, op_name, value_of


class FloatTensors(dict[Node, bool]):
    """Which nodes `is_float_tensor` holds for."""

    def __missing__(self, node: Node) -> bool:
        """Ask the node."""
        found = self[node] = is_float_tensor(node)
        return found


class Costs(dict[Node, int]):
    """What each op costs in float: its multiply-accumulates, or its output's elements where it has no weight."""

    def __missing__(self, node: Node) -> int:
        """Ask the node."""
        found = self[node] = _cost(node)
        return found


def _cost(node: Node) -> int:
    rule = HEADS.get(op_name(node))
    weight = argument(node, rule.weight) if rule else None
    if rule is None or not isinstance(weight, Node):
        return numel(node)
    shape = getattr(value_of(weight), "shape", ())
    channels = int(shape[rule.channel_axis]) if len(shape) > rule.channel_axis else 1
    return numel(node) * max(1, numel(weight) // max(1, channels))
