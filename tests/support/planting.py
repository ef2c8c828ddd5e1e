"""Plant defects in converted graphs, by editing the arguments of quantize and dequantize nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from support.flow import calls, is_dequantize, is_quantize, pair_of

_LIB = torch.ops.quantized_decomposed
_FIELDS = ("scale", "zero_point", "quant_min", "quant_max", "dtype")


def the(graph: GraphModule, name: str, index: int = 0) -> Node:
    """The call of an aten op, by name."""
    return calls(graph, name)[index]


def quantize_after(node: Node) -> Node:
    """The only quantize that reads a node."""
    (found,) = [user for user in node.users if is_quantize(user)]
    return found


def set_qparams(quantize: Node, *, pairs: bool = True, **fields: Any) -> None:
    """Change qparams of a quantize, and of the dequantizes that read it."""
    for node in [quantize, *([u for u in quantize.users if is_dequantize(u)] if pairs else [])]:
        args = list(node.args)
        for name, value in fields.items():
            args[1 + _FIELDS.index(name)] = value
        node.args = tuple(args)


def insert_pair(value: Node, like: Node | None = None, **fields: Any) -> Node:
    """Quantize and dequantize a value for all its readers, with the qparams of another node or those given."""
    pair = pair_of(like) if like is not None else None
    args = [fields.get(name, getattr(pair, name, None)) for name in _FIELDS]
    readers = list(value.users)
    graph = value.graph
    with graph.inserting_after(value):
        quantize = graph.call_function(_LIB.quantize_per_tensor.default, (value, *args))
    with graph.inserting_after(quantize):
        dequantize = graph.call_function(_LIB.dequantize_per_tensor.default, (quantize, *args))
    for reader in readers:
        reader.replace_input_with(value, dequantize)
    return quantize


def bypass(quantize: Node) -> None:
    """Take a quantize and its dequantizes out: their readers read the value itself."""
    for dequantize in list(quantize.users):
        dequantize.replace_all_uses_with(quantize.args[0])  # type: ignore[arg-type]
        quantize.graph.erase_node(dequantize)
    quantize.graph.erase_node(quantize)
