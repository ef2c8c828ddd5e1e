"""What is asked of an FX graph: names, operands, dtypes, origins. Read-only."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx.graph_module import GraphModule
    from torch.fx.node import Argument


def op_name(node: Node) -> str:
    """Return the canonical name of the aten op that the node calls, or "" if it calls none.

    Overload, in-place underscore and `_copy` suffix are cut off, in the aten and the edge dialect:
    aten.relu_.default is "relu", aten.slice_copy.Tensor is "slice".
    """
    return canonical_name(node.target) if node.op == "call_function" else ""


@cache  # each op of a graph is asked many times, and asking its schema is slow
def canonical_name(target: object) -> str:
    """Return the canonical name of an operator, or "" if it is none of aten's."""
    if target is operator.getitem:
        return "getitem"
    schema = getattr(target, "_schema", None)
    name = getattr(schema, "name", "")
    if not name.startswith("aten::"):
        return ""
    return name.removeprefix("aten::").removesuffix("_copy").rstrip("_")


EXPORTED_AS = "quantmark_exported_as"
"""Key in `node.meta`: the operator that the node called when it was exported, where a rewrite has changed it."""


def is_in_place(node: Node) -> bool:
    """Tell whether the node's op writes into its first operand."""
    schema = getattr(node.target, "_schema", None)
    return bool(
        schema and schema.arguments and schema.arguments[0].alias_info and schema.arguments[0].alias_info.is_write
    )


def argument(node: Node, key: int | str) -> Argument:
    """Return an operand by the position or name that the op's schema gives it, else the schema's default."""
    names, defaults = _parameters(node.target)
    index = key if isinstance(key, int) else names.index(key) if key in names else -1
    if not 0 <= index < len(names):
        return None
    return node.args[index] if index < len(node.args) else node.kwargs.get(names[index], defaults[index])


@cache
def _parameters(target: Any) -> tuple[tuple[str, ...], tuple[Argument, ...]]:
    """Return the names and defaults (None where there is none) of an op's parameters."""
    found = target._schema.arguments
    return tuple(p.name for p in found), tuple(p.default_value if p.has_default_value() else None for p in found)


def number(node: Node, key: int | str) -> float | None:
    """Return a scalar operand as a float, or None where it is absent or not a number known now."""
    value = argument(node, key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def operands(node: Node) -> list[Node]:
    """Return the nodes that the node reads, each once, in the order of its arguments."""
    return list(node.all_input_nodes)


def value_of(node: Node) -> object:
    """Return the fake value that export recorded for the node, or None."""
    return node.meta.get("val")


_QUANTIZABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_float_tensor(node: Node) -> bool:
    """Tell whether the node yields one tensor that isn't empty, of a float dtype that quantize ops take."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dtype not in _QUANTIZABLE:
        return False
    sizes: tuple[object, ...] = tuple(value.shape)  # dynamic ones are symbolic, and never empty here
    return 0 not in [size for size in sizes if isinstance(size, int)]


def numel(node: Node) -> int:
    """Return the number of elements of the node's tensor; dynamic sizes count by their hint, else as 1."""
    value = value_of(node)
    total = 1
    for size in getattr(value, "shape", ()):
        total *= int(size) if isinstance(size, int) else _hint(size)
    return total


def _hint(size: object) -> int:
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def rank(node: Node) -> int:
    """Return the number of dimensions of the node's tensor (0 if it has none)."""
    return len(getattr(value_of(node), "shape", ()))


def constant_value(model: GraphModule, node: Node) -> torch.Tensor | None:
    """Return the tensor that a get_attr node reads, or None."""
    if node.op != "get_attr":
        return None
    found: object = model
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch.Tensor) else None


_CONSTANT_THROUGH = frozenset(
    {"lift_fresh", "detach", "alias", "clone", "t", "transpose", "permute", "view", "reshape"}
)


def is_constant(node: Node) -> bool:
    """Tell whether the node is a parameter or buffer, or one that was merely moved about."""
    while op_name(node) in _CONSTANT_THROUGH and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "get_attr"


def constant_tensor(model: GraphModule, node: Node) -> torch.Tensor | None:
    """Return the value of a constant node (see `is_constant`), or None if it isn't one."""
    if node.op == "get_attr":
        return constant_value(model, node)
    if not is_constant(node) or not isinstance(node.args[0], Node) or not callable(node.target):
        return None
    source = constant_tensor(model, node.args[0])
    with torch.no_grad():
        return None if source is None else node.target(source, *node.args[1:], **node.kwargs)


def module_path(node: Node) -> str:
    """Return the path of the module that the node comes from ("layer1.0.conv"), "" for the root."""
    entries = list(node.meta.get("nn_module_stack", {}).values())
    return clean_path(entries[-1][0]) if entries else ""


def module_stack(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (path, qualified type name) of every module around the node, outermost first."""
    for path, kind in node.meta.get("nn_module_stack", {}).values():
        yield clean_path(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def clean_path(path: str) -> str:
    """Return a module path without the prefixes that the export modes put before it."""
    for prefix in ("L['self'].", "L__self__", "self."):
        path = path.removeprefix(prefix)
    path = "" if path in {"L['self']", "self"} else path
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").lstrip(".")


def where(node: Node) -> str:
    """Return node name, op and module path, as messages show them."""
    path = module_path(node)
    op = op_name(node) or node.op
    return f"{node.name} ({op}{', in ' + path if path else ''})"


_UNIMPORTANT = ("sym_", "_assert")


def users(node: Node) -> Sequence[Node]:
    """Return the nodes that read the node's value and matter at run time (no guards, no shape look-ups)."""
    return [u for u in node.users if u.target != "_guards_fn" and not op_name(u).startswith(_UNIMPORTANT)]
