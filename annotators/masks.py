"""Masks: values that mean "not here", and that no qparams describe beside real ones.

    scores = q @ k                      quantized
    scores.masked_fill(pad, -inf)       carries a mask: float
    softmax(...)                        reads a mask: float at its input; what it gives is quantized again

An attention mask adds or writes minus infinity, the smallest float, or a number such as -1e4 or -1e9. One step of
an integer that covers it is larger than every real score; so what carries a mask stays float, up to the op that
turns it into weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from ..configs.ops import HEADS, JOINS, MOVEMENT, NO_OPS, SELECTS
from ..observers.qparams import LARGEST_VALUE
from .graph import constant_value, op_name

if TYPE_CHECKING:
    from torch.fx.graph_module import GraphModule

MASKED_OUT: Final = -1e4
"""Scalars from here down are masks; no activation is meant to be scaled by, or filled with, such a number."""

_CARRIERS: Final = (
    MOVEMENT
    | NO_OPS
    | SELECTS
    | JOINS
    | {"add", "sub", "mul", "div", "where", "masked_fill", "minimum", "getitem", "triu", "tril"}
    | {"to", "_to", "type_as"}
)
_MAKERS: Final = frozenset(
    {"mul", "add", "sub", "rsub", "masked_fill", "where", "full", "full_like", "new_full", "scalar_tensor"}
)


def masked_values(model: GraphModule) -> set[Node]:
    """Return the nodes whose values carry a mask, going through the graph once."""
    found: set[Node] = set()
    for node in model.graph.nodes:
        if node.op == "get_attr":
            if _is_weight(node):
                continue
            tensor = constant_value(model, node)
            if tensor is not None and _is_mask(tensor):
                found.add(node)
        elif node.op == "call_function":
            name = op_name(node)
            carries = found and name in _CARRIERS and not found.isdisjoint(node.all_input_nodes)
            if carries or (name in _MAKERS and any(masks_out(value) for value in _scalars(node))):
                found.add(node)
    return found


def _is_weight(node: Node) -> bool:
    """Tell whether only weighted ops read a constant: it is a weight, or a bias."""
    return HEADS.keys() >= set(map(op_name, node.users))


def _scalars(node: Node) -> list[float]:
    values = [*node.args, *node.kwargs.values()]
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


def masks_out(value: float) -> bool:
    """Tell whether a scalar is a mask, and no factor or summand that is meant as a number."""
    return value <= MASKED_OUT or not abs(value) <= LARGEST_VALUE  # which NaN is not, either


def _is_mask(tensor: torch.Tensor) -> bool:
    """Tell whether a constant holds 0 where something is, and a mask where nothing is."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or float(tensor.detach().min()) > MASKED_OUT:
        return False
    return bool(((tensor <= MASKED_OUT) | (tensor == 0.0)).all())
