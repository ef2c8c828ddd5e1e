"""Open a model for checking: its graph and the values of its constants, whatever form it has."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ..annotators.conversion import ERASED
from ..annotators.graph import constant_value
from ..observers.errors import InputError
from ..observers.ranges import Bounds


@dataclass(frozen=True)
class Program:
    """One graph to check.

    Args:
        model: the graph module.
        constants: values of the placeholders that stand for parameters, buffers and lifted constants.
        name: where it is in the outermost graph ("true_graph_0.false_graph_1"), "" for that graph itself.
    """

    model: GraphModule
    constants: Mapping[str, torch.Tensor]
    name: str = ""

    @property
    def is_nested(self) -> bool:
        """Tell whether it is the body of a higher-order op (cond, a no_grad block) in another graph."""
        return bool(self.name)

    def nested(self) -> Iterator[Program]:
        """Yield the graphs of the higher-order ops in this one, and those in them."""
        for node in self.model.graph.nodes:
            body = getattr(self.model, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(body, GraphModule):
                program = Program(body, self._passed(node, body), f"{self.name}.{node.target}".lstrip("."))
                yield program
                yield from program.nested()

    def _passed(self, handle: Node, body: GraphModule) -> dict[str, torch.Tensor]:
        """Return the constants that reach a nested graph as operands of its call, by placeholder; they come last."""
        found: dict[str, torch.Tensor] = {}
        for call in handle.users:
            operands = call.args[-1] if call.args else ()
            if not isinstance(operands, (tuple, list)):
                continue
            places = body.graph.find_nodes(op="placeholder")[-len(operands) :] if operands else []
            for place, operand in zip(places, operands, strict=False):
                if isinstance(operand, Node):
                    known = self.constants.get(operand.name)
                    value = known if known is not None else constant_value(self.model, operand)
                    found |= {} if value is None else {place.name: value}
        return found


def erased_activation(node: Node) -> tuple[str, Bounds] | None:
    """Return name and bounds of the activation that conversion erased behind a node, or None."""
    found = node.meta.get("custom", {}).get(ERASED)
    return (str(found["name"]), Bounds(found["lower"], found["upper"])) if isinstance(found, dict) else None


def original_names(node: Node) -> list[str]:
    """Return the names that a node has had, the one of the first export first, and its own last.

    Exporting a graph again, taking it to the edge and tracing it anew name nodes afresh; torch records where each came
    from.
    """
    past, sources = [node.name], node.meta.get("from_node")
    while sources:
        past.append(sources[-1].name)
        sources = sources[-1].from_node
    if (erased := erased_activation(node)) is not None:
        past.append(erased[0])  # whose value the node has now
    if node.op == "placeholder" and hasattr(builtins, node.name):
        past.insert(0, f"{node.name}_1")  # as graph modules spell names that Python has
    return list(dict.fromkeys(past[::-1]))


def open_programs(model: object) -> list[Program]:
    """Return the graphs of a converted module, an exported program, or an edge program manager, with nested ones.

    Raises:
        InputError: if the model is none of these.
    """
    return [each for top in _top_programs(model) for each in (top, *top.nested())]


def _top_programs(model: object) -> list[Program]:
    if isinstance(model, GraphModule):
        return [Program(model, {})]
    if isinstance(model, ExportedProgram):
        return [_exported(model)]
    methods, getter = getattr(model, "methods", None), getattr(model, "exported_program", None)
    if callable(getter) and methods is not None:
        get = cast("Callable[[str], ExportedProgram]", getter)
        return [_exported(get(name)) for name in sorted(cast("Iterable[str]", methods))]
    raise InputError(
        "check() needs a converted GraphModule, an ExportedProgram or an EdgeProgramManager, "
        f"got {type(model).__name__}: pass what convert_pt2e, torch.export.export or to_edge returned"
    )


def _exported(program: ExportedProgram) -> Program:
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    found: dict[str, torch.Tensor] = {}
    for placeholder, name in names.items():
        value = program.state_dict.get(name, program.constants.get(name))
        if isinstance(value, torch.Tensor) and name not in written:
            found[placeholder] = value
    return Program(program.graph_module, found)
