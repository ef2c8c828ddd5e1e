"""Values that share memory: what writing in place means to whoever reads the same memory under another name.

    y = conv(x)         v and y are one memory: relu_ changes both. A quantize/dequantize pair behind y, or on the edge
    v = y[:, :2]        from v to a reader, copies: from then on the two names would hold different values.
    relu_(y)

So a write is made functional where that can be done exactly: later readers of the base read the new value, later
readers of a view of it read that view taken anew. Where it can't (the base is itself a view of a tensor that is read
later; a graph input, parameter or buffer, whose change is meant), the write stays, and so does the order of reads: each
later reader reads through an alias that stands behind the write. All names of that memory then stay float.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from .graph import argument, is_float_tensor, is_in_place, of_operator, op_name, value_of

if TYPE_CHECKING:
    from torch.fx.graph_module import GraphModule

_ATEN = torch.ops.aten
_RETURNS_OPERAND: Final = frozenset(  # although its schema does not say so
    {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"}
    | {"type_as", "einsum", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "pad"}
    | {"atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "broadcast_tensors"}
)
_MAY_COPY: Final = frozenset({"reshape", "reshape_as", "contiguous", "flatten", "to", "type_as", "einsum", "pad"})
"""Whether these return a view or a copy depends on the tensor's strides or dtype."""


class Memory:
    """The values of a graph, grouped by the memory that they may share."""

    def __init__(self, model: GraphModule) -> None:
        self._group: dict[Node, list[Node]] = {}
        attributes: dict[str, Node] = {}
        for node in model.graph.nodes:
            for source in _sources(node):
                self._join(source, node)
            if node.op == "get_attr":  # each mention of a buffer is the same memory
                self._join(attributes.setdefault(str(node.target), node), node)

    def others(self, node: Node) -> list[Node]:
        """Return the values, the node's own among them, that may share its memory."""
        return self._group.get(node, [node])

    def _join(self, first: Node, second: Node) -> None:
        mine, theirs = self._group.setdefault(first, [first]), self._group.setdefault(second, [second])
        if mine is not theirs:
            mine += theirs
            self._group.update(dict.fromkeys(theirs, mine))

    def make_functional(self, node: Node) -> bool:
        """Turn an in-place op into its functional twin, or else put its readers in order; tell if anything changed."""
        if not is_in_place(node) or not is_float_tensor(node) or not isinstance(base := node.args[0], Node):
            return False
        views = _views(base, before=node)
        twin = _functional(node)
        if twin is None or not _keeps_dtype(node) or not self._is_all(base, views, node):
            return self._put_in_order(node)
        anew = {base: node}
        last = node
        for view in views:
            with node.graph.inserting_after(last):
                last = anew[view] = node.graph.node_copy(view, lambda each: anew.get(each, each))
            self._join(node, last)
        for old, new in anew.items():
            _redirect(old, new, after=node, keep=set(anew.values()))
        for view in reversed(views):
            if not anew[view].users:
                node.graph.erase_node(anew[view])
                self.others(node).remove(anew[view])
        node.target = twin
        return True

    def _is_all(self, base: Node, views: list[Node], write: Node) -> bool:
        """Tell whether `base` and `views` are all that reads the memory later, and the views can be taken anew."""
        known = {base, *views, write}
        if any(other.op != "call_function" for other in self.others(base)):
            return False
        for other in self.others(base):
            if other not in known and other < write and _later(other, write):
                return False
        return not any(op_name(view) in _MAY_COPY and _later(view, write) for view in views)

    def _put_in_order(self, write: Node) -> bool:
        """Let each later reader of the memory read through an alias that stands behind the write."""
        changed = False
        for other in list(self.others(write)):
            out_of_order = [each for each in _later(other, write) if each.target is not _ATEN.alias.default]
            if other is write or not other < write or not out_of_order or not is_float_tensor(other):
                continue
            new = write
            if other is not write.args[0]:
                with write.graph.inserting_after(write):
                    new = write.graph.call_function(_ATEN.alias.default, (other,))
                new.meta = dict(other.meta)
                self._join(write, new)
            _redirect(other, new, after=write, keep={new})
            changed = True
        return changed


def written_memory(model: GraphModule) -> dict[Node, list[Node]]:
    """Return, for each memory of float values that is written in place, its first writer and all that must stay float.

    That is whatever shares the memory and, where it is a buffer's, the readers of what is computed from buffers alone:
    `convert_pt2e` would quantize that once and for all.
    """
    writing = (node for node in model.graph.nodes if node.op == "call_function" and _aliased(node.target)[1])
    writes = [node for node in writing if any(is_float_tensor(target) for target in _written(node))]
    if not writes:
        return {}
    memory = Memory(model)
    found: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for write in writes:
        if write not in seen:
            shared = dict.fromkeys([write, *memory.others(_written(write)[0])])
            constant: set[Node] = set()
            for node in sorted(shared):
                if node.op == "get_attr" or (node.op == "call_function" and constant.issuperset(node.all_input_nodes)):
                    constant.add(node)
            seen.update(shared)
            found[write] = list(shared | dict.fromkeys(reader for node in constant for reader in node.users))
    return found


@of_operator
def _aliased(target: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which arguments of an operator share memory with its result, and which of its arguments it writes to."""
    schema = getattr(target, "_schema", None)
    aliased = [(index, a.alias_info) for index, a in enumerate(schema.arguments) if a.alias_info] if schema else []
    shares = schema is not None and any(each.alias_info for each in schema.returns)
    return tuple(i for i, _ in aliased) if shares else (), tuple(i for i, info in aliased if info.is_write)


def _sources(node: Node) -> list[Node]:
    """Return the operands whose memory the node's value may share."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem or op_name(node) in _RETURNS_OPERAND:
        found: list[object] = list(node.all_input_nodes)
    else:
        found = [argument(node, index) for index in _aliased(node.target)[0]]
    return [
        each for each in found if isinstance(each, Node) and isinstance(value_of(each), (torch.Tensor, tuple, list))
    ]


def _written(node: Node) -> list[Node]:
    """Return the operands that the node writes to."""
    found = [argument(node, index) for index in _aliased(node.target)[1]] if node.op == "call_function" else []
    return [each for each in found if isinstance(each, Node)]


def _views(base: Node, before: Node) -> list[Node]:
    """Return the views of `base`, and of these, that were taken before a node, in graph order."""
    found: set[Node] = set()
    pending = [base]
    while pending:
        value = pending.pop()
        fresh = [u for u in value.users if u < before and value in _sources(u) and not is_in_place(u)]
        pending += [each for each in fresh if each not in found]
        found.update(fresh)
    return sorted(found)


def _later(value: Node, node: Node) -> list[Node]:
    """Return the readers of a value that stand behind a node."""
    return [user for user in value.users if node < user]


def _redirect(old: Node, new: Node, *, after: Node, keep: set[Node]) -> None:
    for user in _later(old, after):
        if user not in keep:
            user.replace_input_with(old, new)


def _functional(node: Node) -> torch._ops.OpOverload | None:
    packet = getattr(_ATEN, op_name(node), None)
    overload = getattr(node.target, "_overloadname", "default")
    found = getattr(packet, overload, None) if packet is not None else None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _keeps_dtype(node: Node) -> bool:
    """Tell whether no operand would promote the functional op's result to another dtype than the base's."""
    values = [value_of(each) for each in node.all_input_nodes]
    dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor) and each.dtype.is_floating_point}
    return len(dtypes) <= 1 or op_name(node) == "copy"
