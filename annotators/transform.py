"""Rewrites before annotation: the same function, spelled so that it can be quantized.

* Tensor keyword arguments become positional (torchao can't annotate an edge that is a keyword argument).
* In-place ops become functional: once a quantize/dequantize pair stands behind the base, a later reader of the
  base would no longer see what the op wrote.
* Scalar operands of add, sub and mul become constants, which can be quantized.
* Clamps in a row become one, and every clamp is spelled as relu, hardtanh or clamp, by its bounds: backends fold
  some spellings only, and a relu6 is a relu6 however it is written.

No weight is touched: the exported module shares its parameters with the user's eager model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .blocks import clamp_bounds
from .graph import is_float_tensor, is_in_place, op_name, value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node
    from torch.fx.graph_module import GraphModule

    from ..configs.base import BackendConfig

_ATEN = torch.ops.aten
_SCALAR_OPS = {"add": _ATEN.add.Tensor, "sub": _ATEN.sub.Tensor, "mul": _ATEN.mul.Tensor}
LARGEST_CONSTANT = 1e30  # beyond it (masks of the smallest float) a constant is no activation to be quantized


def transform(model: GraphModule, config_of: Callable[[Node], BackendConfig | None]) -> GraphModule:
    """Rewrite the graph in place and return it."""
    changed = False
    for node in list(model.graph.nodes):
        if node.op != "call_function" or not op_name(node) or op_name(node) == "getitem":
            continue
        changed |= _make_positional(node)
        changed |= _make_functional(node)
        config = config_of(node)
        if config is not None and config.ops.constants and op_name(node) in config.ops.own:
            changed |= _lift_scalar(model, node)
    for node in reversed(list(model.graph.nodes)):  # from the last clamp of a row, which swallows the others
        if node.op == "call_function" and config_of(node) is not None:
            changed |= _spell_clamp(node)
    if changed:
        model.graph.lint()
        model.recompile()
    return model


def _make_positional(node: Node) -> bool:
    if not any(isinstance(value, torch.fx.Node) for value in node.kwargs.values()):
        return False
    args, kwargs = list(node.args), dict(node.kwargs)
    for parameter in node.target._schema.arguments[len(args) :]:  # type: ignore[union-attr]
        if parameter.kwarg_only or not kwargs:
            break
        if parameter.name in kwargs:
            args.append(kwargs.pop(parameter.name))
        elif parameter.has_default_value():
            args.append(parameter.default_value)
        else:
            break
    node.args, node.kwargs = tuple(args), kwargs
    return True


def _make_functional(node: Node) -> bool:
    """Turn an in-place op into its functional twin; later readers of the base read its result instead."""
    if not is_in_place(node) or not is_float_tensor(node):
        return False
    twin = _functional(node)
    base = node.args[0]
    if twin is None or not isinstance(base, torch.fx.Node) or base.op != "call_function":
        return False  # writing into an input, a parameter or a buffer is meant
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    for user in list(base.users):
        if user is not node and order[user] > order[node]:
            user.replace_input_with(base, node)
    node.target = twin
    return True


def _functional(node: Node) -> torch._ops.OpOverload | None:
    packet = getattr(_ATEN, op_name(node), None)
    overload = getattr(node.target, "_overloadname", "default")
    found = getattr(packet, overload, None) if packet is not None else None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _lift_scalar(model: GraphModule, node: Node) -> bool:
    """Turn the scalar operand of add, sub or mul into a constant tensor."""
    target = _SCALAR_OPS.get(op_name(node))
    if target is None or len(node.args) < 2 or not is_float_tensor(node):
        return False
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        return False
    scalars = [i for i in (0, 1) if isinstance(node.args[i], (int, float)) and not isinstance(node.args[i], bool)]
    if len(scalars) != 1 or abs(float(node.args[scalars[0]])) > LARGEST_CONSTANT:  # type: ignore[arg-type]
        return False
    args = list(node.args)
    args[scalars[0]] = _constant(model, node, float(node.args[scalars[0]]))  # type: ignore[arg-type]
    node.args, node.kwargs, node.target = tuple(args), {}, target
    return True


def _spell_clamp(node: Node) -> bool:
    """Spell a clamp by its bounds, together with the clamps that it alone reads."""
    bounds = clamp_bounds(node)
    if bounds is None or not bounds.is_bounded or not is_float_tensor(node):
        return False
    source, swallowed = node.args[0], []
    while isinstance(source, torch.fx.Node) and len(source.users) == 1 and (first := clamp_bounds(source)) is not None:
        bounds = first.then(bounds)
        swallowed.append(source)
        source = source.args[0]
    low, high = bounds.lower, bounds.upper
    if low == 0.0 and high is None:
        target, args = _ATEN.relu.default, (source,)
    elif low is not None and high is not None:
        target, args = _ATEN.hardtanh.default, (source, low, high)  # type: ignore[assignment]
    else:
        target, args = _ATEN.clamp.default, (source, low, high)  # type: ignore[assignment]
    if (node.target, node.args) == (target, args) and not node.kwargs:
        return False
    node.target, node.args, node.kwargs = target, args, {}
    for each in swallowed:
        node.graph.erase_node(each)
    return True


def _constant(model: GraphModule, node: Node, value: float) -> Node:
    fake = value_of(node)
    dtype = getattr(fake, "dtype", torch.float32)
    tensor = torch.full((1,), value, dtype=dtype, device=getattr(fake, "device", "cpu"))
    index = 0
    while hasattr(model, name := f"_scalar_{index}"):
        index += 1
    model.register_buffer(name, tensor)
    with node.graph.inserting_before(node):
        constant = node.graph.get_attr(name)
    mode = getattr(fake, "fake_mode", None)
    constant.meta["val"] = mode.from_tensor(tensor) if mode is not None else tensor
    return constant
