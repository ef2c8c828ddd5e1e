"""What is asked of an FX graph: names, operands, dtypes, origins. Read-only."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx.graph_module import GraphModule
    from torch.fx.node import Argument

T = TypeVar("T")


def op_name(node: Node) -> str:
    """Return the canonical name of the aten op that the node calls, or "" if it calls none.

    Overload, in-place underscore and `_copy` suffix are cut off, in the aten and the edge dialect:
    aten.relu_.default is "relu", aten.slice_copy.Tensor is "slice".
    """
    if node.op != "call_function":
        return ""
    target = node.target
    try:
        return _NAMES[id(target)][1]
    except KeyError:
        name = canonical_name(target)
        _NAMES[id(target)] = target, name
        return name


_NAMES: dict[int, tuple[object, str]] = {}
"""Names by the operator's identity (see `of_operator`): each node is asked for its name a dozen times."""


def of_operator(ask: Callable[[Any], T]) -> Callable[[object], T]:
    """Keep what is asked of an operator, by its identity: it hashes in Python, which takes longer than the look-up."""
    known: dict[int, tuple[object, T]] = {}

    def answer(target: object) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, ask(target)
        return found[1]

    return answer


@of_operator
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
    return _writes_first(node.target)


@of_operator
def _writes_first(target: object) -> bool:
    schema = getattr(target, "_schema", None)
    first = schema.arguments[0].alias_info if schema and schema.arguments else None
    return bool(first and first.is_write)


def argument(node: Node, key: int | str) -> Argument:
    """Return an operand by the position or name that the op's schema gives it, else the schema's default."""
    args = node.args
    if key.__class__ is int and key < len(args):
        return args[key]
    found = _parameters(node.target).get(key)
    if found is None:
        return None
    index, name, default = found
    return args[index] if index < len(args) else node.kwargs.get(name, default)


@of_operator
def _parameters(target: Any) -> dict[int | str, tuple[int, str, Argument]]:
    """Return position, name and default (None where there is none) of an op's parameters, by position and by name."""
    found: dict[int | str, tuple[int, str, Argument]] = {}
    for index, each in enumerate(target._schema.arguments):
        found[index] = found[each.name] = index, each.name, each.default_value if each.has_default_value() else None
    return found


def number(node: Node, key: int | str) -> float | None:
    """Return a scalar operand as a float, or None where it is absent or not a number known now."""
    value = argument(node, key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def value_of(node: Node) -> object:
    """Return the fake value that export recorded for the node, or None."""
    return node.meta.get("val")


_QUANTIZABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_float_tensor(node: Node) -> bool:
    """Tell whether the node yields one tensor that isn't empty, of a float dtype that quantize ops take."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _QUANTIZABLE:
        return False
    count = value.numel()
    if count.__class__ is int:
        return count != 0
    # Dynamic sizes are never empty here: to compare one with 0 would put a guard on it.
    return all(size for size in value.shape if size.__class__ is int)


def numel(node: Node) -> int:
    """Return the number of elements of the node's tensor; dynamic sizes count by their hint, else as 1."""
    value = value_of(node)
    if isinstance(value, torch.Tensor) and (count := value.numel()).__class__ is int:
        return count
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
    while node.op != "get_attr":
        source = node.args[0] if node.args and op_name(node) in _CONSTANT_THROUGH else None
        if not isinstance(source, Node):
            return False
        node = source
    return True


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
    stack = node.meta.get("nn_module_stack")
    return clean_path(next(reversed(stack.values()))[0]) if stack else ""


def module_stack(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (path, qualified type name) of every module around the node, outermost first."""
    for path, kind in node.meta.get("nn_module_stack", {}).values():
        yield clean_path(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


@lru_cache(maxsize=1 << 14)  # every node of a module asks for the same
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
    return [user for user in node.users if matters(user)]


def matters(node: Node) -> bool:
    """Tell whether a node is no guard and no shape look-up."""
    return _computes(node.target) if node.op == "call_function" else node.target != "_guards_fn"


@of_operator
def _computes(target: object) -> bool:
    return not canonical_name(target).startswith(_UNIMPORTANT)
