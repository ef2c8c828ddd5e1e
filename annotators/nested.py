"""Graphs within the graph: regions under `no_grad`, the branches of `torch.cond`, the bodies of loops.

A forward under `no_grad` is exported as one call of a nested graph, in which a quantizer sees nothing; quantization
does not train, so the nested graph is written out in its place. The branches of a cond can't be: each is prepared by
itself (its weights, which export passes in as operands, are read from the branch's own attributes instead), and
converted when the outer graph is (`NestedGraphs`).

torchao prepares the bodies of scan and while_loop itself, with the quantizer of the outer graph, in place: the outer
graph gets copies of its own first, since the user's exported program holds these very objects.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import ObserverBase
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from .graph import constant_value, is_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.fx.node import Argument

_NO_GRAD: Final = torch._higher_order_ops.wrap.wrap_with_set_grad_enabled
_COND: Final = torch.ops.higher_order.cond
_PREPARED: Final = "quantmark_prepared_branch"
_LOOPS: Final = (torch.ops.higher_order.scan, torch.ops.higher_order.while_loop)
_GRAPHS: Final[dict[Any, slice]] = {_COND: slice(1, 3), _LOOPS[0]: slice(0, 1), _LOOPS[1]: slice(0, 2)}
"""Which operands of a call are the graphs that it runs."""
_BODY: Final = "quantmark_loop_body"
_NESTED: Final = "_quantmark_nested_graphs"


def inline_no_grad(model: GraphModule) -> bool:
    """Write the regions under `no_grad` out in place; return whether there were any."""
    found = [n for n in model.graph.nodes if n.op == "call_function" and n.target is _NO_GRAD]
    for call in found:
        body = _submodule(model, call.args[1])
        if body is not None:
            _inline(model, call, body)
    return bool(found)


def _inline(model: GraphModule, call: Node, body: GraphModule) -> None:
    if any(n.target is _NO_GRAD for n in body.graph.nodes):
        body = copy.deepcopy(body)  # it belongs to the exported program too
        inline_no_grad(body)
    operands = iter(call.args[2:])
    twins: dict[Node, Argument] = {}
    result: Argument = None
    with model.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                twins[node] = next(operands)
            elif node.op == "output":
                result = torch.fx.map_arg(node.args[0], lambda n: twins[n])
            else:
                if node.op in {"get_attr", "call_module"}:
                    _bring(model, body, str(node.target))
                twins[node] = model.graph.node_copy(node, lambda n: twins[n])
    for item in list(call.users):
        if isinstance(result, (tuple, list)) and len(item.args) > 1:
            index = item.args[1]
            item.replace_all_uses_with(result[index])  # type: ignore[index, arg-type]
            model.graph.erase_node(item)
    handle = call.args[1]
    model.graph.erase_node(call)
    if isinstance(handle, Node) and not handle.users:
        model.graph.erase_node(handle)


def _bring(model: GraphModule, body: GraphModule, name: str) -> None:
    """Give the outer module an attribute that a nested graph reads."""
    if not hasattr(model, name.split(".", maxsplit=1)[0]):
        setattr(model, name.split(".", maxsplit=1)[0], getattr(body, name.split(".", maxsplit=1)[0]))


def loops(model: GraphModule) -> list[Node]:
    """Return the calls of scan and while_loop."""
    return _calls(model, _LOOPS)


def conds(model: GraphModule) -> list[Node]:
    """Return the calls of cond."""
    return _calls(model, [_COND])


def _calls(model: GraphModule, targets: Iterable[Any]) -> list[Node]:
    return [node for target in targets for node in model.graph.find_nodes(op="call_function", target=target)]


def _graphs(model: GraphModule, call: Node) -> list[tuple[str, GraphModule]]:
    """Return name and graph of each graph that a call runs, a loop's body last; none if one is no graph module."""
    handles = call.args[_GRAPHS[call.target]]
    graphs = [graph for handle in handles if (graph := _submodule(model, handle)) is not None]
    names = [str(handle.target) for handle in handles if isinstance(handle, Node)]
    return list(zip(names, graphs, strict=True)) if len(graphs) == len(handles) else []


def keep_bodies_float(model: GraphModule) -> None:
    """Mark the bodies of loops as prepared, with nothing to quantize, for a training that torchao enters no loop in.

    torchao (0.18) converts them all the same, and refuses what nobody prepared.
    """
    for loop in loops(model):
        for name, body in _graphs(model, loop)[-1:]:
            setattr(model, name, prepare_pt2e(copy.deepcopy(body), Nothing()))


class NestedGraphs(ObserverBase):
    """What `convert_pt2e` makes of nested graphs, as an observer that observes nothing: it converts all observers.

    The branches of conds are converted, and constants passed in from outside. torchao (0.18) then deletes what the
    outer graph does not mention, graphs that a nested one calls among it, and fails on that. An attribute that is no
    registered submodule is not deleted, and what is called there holds no state any more.
    """

    _is_impure = True  # no dead code

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def forward(self, graph: GraphModule) -> None:
        """Do nothing with one of the nested graphs, which is what it seems to observe."""

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return what stands for nothing."""
        return torch.ones(1), torch.zeros(1)

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Convert the nested graphs (called by `convert_pt2e`, after it has converted the bodies of loops)."""
        _convert_branches(model)
        open_graphs(model)
        for name in _inner_graphs(model):
            path, _, last = name.rpartition(".")
            parent = model.get_submodule(path)
            parent.__dict__[last] = parent._modules.pop(last)
        model.graph.erase_node(observer_node)


def convert_nested(model: GraphModule) -> None:
    """See to it that the model's nested graphs are converted with it."""
    calls = _calls(model, _GRAPHS)
    if calls and not any(isinstance(each, NestedGraphs) for each in model.children()):
        model.add_submodule(_NESTED, NestedGraphs())
        with model.graph.inserting_before(calls[0]):
            model.graph.call_module(_NESTED, calls[0].args[_GRAPHS[calls[0].target]][:1])
        model.recompile()


def _inner_graphs(model: GraphModule) -> list[str]:
    """Return the paths of graphs within nested graphs, the deepest first."""
    graphs = [name for name, inner in model.named_modules() if isinstance(inner, GraphModule)]
    return [name for name in reversed(graphs) if "." in name]


class Nothing(Quantizer):
    """Quantizes nothing."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """See to the nested graphs alone."""
        convert_nested(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Find nothing to check."""


def own_bodies(model: GraphModule) -> None:
    """Give the model copies of its loops' bodies (and conditions) for its own, with the constants that they read."""
    for loop in loops(model):
        if not any(is_body(body) for _, body in _graphs(model, loop)):
            for name, own in _closed_copies(model, loop):
                own.meta[_BODY] = str(loop.target)
                setattr(model, name, own)


def _closed_copies(model: GraphModule, call: Node) -> list[tuple[str, GraphModule]]:
    """Return copies of a call's graphs that hold the constants among its operands; the call passes the others alone.

    Copies, because every `.module()` of an exported program holds these very objects.
    """
    operands, graphs = call.args[-1], _graphs(model, call)
    if not graphs or not isinstance(operands, (tuple, list)):
        return []
    values = [_constant(model, each) for each in operands]
    copies = [(name, copy.deepcopy(shared)) for name, shared in graphs]
    for _, own in copies:
        carried = len(own.graph.find_nodes(op="placeholder")) - len(values)
        _close(own, [None] * carried + values)
    kept = tuple(each for each, value in zip(operands, values, strict=True) if value is None)
    call.args = (*call.args[:-1], kept)
    return copies


def _constant(model: GraphModule, operand: object) -> torch.Tensor | None:
    """Return the value of an operand that is a constant, and not a buffer that the model writes to."""
    if not isinstance(operand, Node) or operand.op != "get_attr":
        return None
    mentions = model.graph.find_nodes(op="get_attr", target=operand.target)
    if any(is_in_place(reader) for mention in mentions for reader in mention.users):
        return None
    return constant_value(model, operand)


def has_while_loop(model: GraphModule) -> bool:
    """Tell whether the graph holds a while_loop, or is the body of one."""
    target = torch.ops.higher_order.while_loop
    return model.meta.get(_BODY) == str(target) or bool(_calls(model, [target]))


def is_body(model: GraphModule) -> bool:
    """Tell whether the graph is the body of a loop in one that was annotated before."""
    return _BODY in model.meta


def prepare_branches(model: GraphModule, make: Callable[[], Quantizer]) -> list[str]:
    """Prepare the branches of every cond, each with a quantizer of its own; return their names."""
    names = []
    for call in _calls(model, [_COND]):
        if any(branch.meta.get(_PREPARED) for _, branch in _graphs(model, call)):
            continue
        for name, branch in _closed_copies(model, call):
            prepared = prepare_pt2e(branch, make())
            prepared.meta[_PREPARED] = True
            setattr(model, name, prepared)
            names.append(name)
    return names


def _close(branch: GraphModule, values: Sequence[torch.Tensor | None]) -> None:
    """Let a branch read the constants among its operands from attributes of its own, and take the others alone.

    With parameters among the operands, torch would trace the branches for their gradients, past the observers.
    """
    places = [node for node in branch.graph.nodes if node.op == "placeholder"]
    last = places[-1]
    for place, value in zip(places, values, strict=True):
        if value is None:
            continue
        if place.users:
            name = f"_constant_{place.name}"
            if isinstance(value, torch.nn.Parameter):  # as torchao has it that folds a batch norm into it
                branch.register_parameter(name, torch.nn.Parameter(value.detach(), requires_grad=False))
            else:
                branch.register_buffer(name, value.detach())
            with branch.graph.inserting_after(last):
                twin = branch.graph.get_attr(name)
            twin.meta.update(place.meta)
            place.replace_all_uses_with(twin)
    for place, value in zip(places, values, strict=True):
        if value is not None:
            branch.graph.erase_node(place)
    branch.recompile()


def open_graphs(model: GraphModule) -> None:
    """Pass the constants of converted nested graphs in as operands: exported anew, attributes of their own are lost."""
    for call in _calls(model, _GRAPHS):
        operands, graphs = call.args[-1], _graphs(model, call)
        if not graphs or not isinstance(operands, (tuple, list)):
            continue
        added: list[Node] = []
        for name, body in graphs:
            constants = [(n, value) for n in body.graph.nodes if (value := constant_value(body, n)) is not None]
            for constant, value in constants:
                added.append(_hoist(model, call, constant, value, f"_{name}_{constant.name}"))
                for _, other in graphs:
                    place = _placeholder(other, added[-1])
                    if other is body:
                        constant.replace_all_uses_with(place)
                        body.graph.erase_node(constant)
        call.args = (*call.args[:-1], (*operands, *added))
        for _, body in graphs:
            body.recompile()


def _hoist(model: GraphModule, call: Node, constant: Node, value: torch.Tensor, name: str) -> Node:
    """Return a node, before the call, that reads a nested graph's constant from the outer module."""
    while hasattr(model, name):
        name += "_"
    model.register_buffer(name, value.detach())
    with model.graph.inserting_before(call):
        node = model.graph.get_attr(name)
    node.meta = dict(constant.meta)
    return node


def _placeholder(body: GraphModule, operand: Node) -> Node:
    """Add a placeholder for one more operand to a nested graph."""
    places = body.graph.find_nodes(op="placeholder")
    with body.graph.inserting_after(places[-1]) if places else body.graph.inserting_before():
        place = body.graph.placeholder(f"{operand.name}_operand")
    place.meta = dict(operand.meta)
    return place


def _convert_branches(model: GraphModule) -> None:
    """Convert the branches that `prepare_branches` prepared."""
    for call in _calls(model, [_COND]):
        for name, branch in _graphs(model, call):
            if branch.meta.pop(_PREPARED, False):
                converted = convert_pt2e(branch)
                converted.meta.pop(_PREPARED, None)
                setattr(model, name, converted)


def inner_ops(model: GraphModule) -> str:
    """Say how many ops lie in nested graphs, where nothing was annotated; "" if none do."""
    inner = {
        name: sum(n.op == "call_function" for n in sub.graph.nodes)
        for name, sub in model.named_modules()
        if name and isinstance(sub, GraphModule)
    }
    count = sum(inner.values())
    return f" ({count} ops lie in nested graphs: {', '.join(inner)})" if count else ""


def _submodule(model: GraphModule, handle: object) -> GraphModule | None:
    if not isinstance(handle, Node) or handle.op != "get_attr":
        return None
    found = getattr(model, str(handle.target), None)
    return found if isinstance(found, GraphModule) else None
