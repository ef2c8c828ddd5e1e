"""Power spectra and norms: squares that feed a logarithm, a root or a reciprocal.

    re*re --+
            add -- (+ eps) -- log        squaring doubles the range in dB, and the logarithm looks at the small end:
    im*im --+                            where int8 sees one code, the logarithm sees 40 dB

The squares, and what adds them up on the way, are left float or widened to int16, as the config says; where it can do
neither, the user is told.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from torch.fx import Node

from ..configs.base import BackendConfig, Spectra
from ..configs.ops import MOVEMENT, NO_OPS, SELECTS
from ..observers.qparams import INT16_SYMMETRIC
from .graph import argument, number, op_name

if TYPE_CHECKING:
    from torch.fx.graph_module import GraphModule

_LOOKS_AT_SMALL: Final = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"}
_ENDS: Final = _LOOKS_AT_SMALL | {"div", "pow"}
_SUMS: Final = MOVEMENT | NO_OPS | SELECTS | {"add", "sum", "mean", "clamp", "clamp_min", "maximum", "getitem"}


@cache
def for_spectrum(config: BackendConfig) -> BackendConfig | None:
    """Return the config of a node on a spectrum's way: the same object for the same config, or None for float."""
    if config.ops.spectra is Spectra.WIDE:
        return config.with_scheme(INT16_SYMMETRIC)
    return None if config.ops.spectra is Spectra.FLOAT else config


def spectrum_values(model: GraphModule) -> set[Node]:
    """Return the products that feed a logarithm, root or reciprocal, the sums on the way, and these readers."""
    found: set[Node] = set()
    for node in model.graph.nodes:
        name = op_name(node)
        if name in _ENDS and (source := small_end(node)) is not None:
            way = _upstream(source)
            found |= way | {node} if way else way
    return found


def small_end(node: Node) -> Node | None:
    """Return the operand whose small values the op looks at (a logarithm, root, reciprocal or divisor), or None."""
    name = op_name(node)
    operand: object = None
    if name in _LOOKS_AT_SMALL:
        operand = argument(node, 0)
    elif name == "div":
        operand = argument(node, 1)
    elif name == "pow" and (number(node, 1) or 1.0) < 1.0:
        operand = argument(node, 0)
    return operand if isinstance(operand, Node) else None


def _upstream(source: Node) -> set[Node]:
    """Return the way from the products down to `source`; empty if there is no product."""
    way: set[Node] = set()
    product = False
    left = [source]
    while left:
        node = left.pop()
        if node in way or node.op != "call_function":
            continue
        if _is_product(node):
            product = True
            way.add(node)
        elif op_name(node) in _SUMS:
            way.add(node)
            left += node.all_input_nodes
    return way if product else set()


def _is_product(node: Node) -> bool:
    """Tell whether the node is a square, or a product of two computed tensors."""
    name = op_name(node)
    if name == "square" or (name == "pow" and (number(node, 1) or 0.0) >= 2.0):
        return True
    return name == "mul" and all(isinstance(arg, Node) and arg.op != "get_attr" for arg in node.args[:2])
