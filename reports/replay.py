"""Run a graph node by node, and look at every value on the way. The graph's buffers are as before afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map_only

from ..annotators.graph import argument, is_in_place, op_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Node

_DRAWS: Final = torch.Tag.nondeterministic_seeded
_SEED: Final = 0  # so that a float graph and its quantized twin draw the same random numbers, where they draw any


def replay(model: GraphModule, inputs: Sequence[Any], visit: Callable[[Node, Any], Any]) -> Any:
    """Return the model's outputs; each node's value is what `visit` makes of it."""
    return replay_with(_Visiting(model, visit), inputs)


def replay_with(interpreter: Interpreter, inputs: Sequence[Any]) -> Any:
    """Return the outputs of an interpreter's model."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _unchanged(interpreter.module):
        torch.manual_seed(_SEED)
        found = interpreter.run(*inputs)
        # An output may be a buffer, which is about to be put back.
        return tree_map_only(Tensor, Tensor.clone, found) if writes_in_place(interpreter.module) else found


def writes_in_place(model: nn.Module) -> bool:
    """Tell whether a node of a graph module may change a value after it was computed."""
    nodes = model.graph.nodes if isinstance(model, GraphModule) else ()
    return any(node.op == "call_function" and is_in_place(node) for node in nodes)


def draws(model: nn.Module) -> bool:
    """Tell whether a node of a graph module draws random numbers."""
    nodes = model.graph.nodes if isinstance(model, GraphModule) else ()
    return any(_DRAWS in getattr(node.target, "tags", ()) and not _is_idle(node) for node in nodes)


def _is_idle(node: Node) -> bool:
    """Tell whether a node is a dropout out of training."""
    return "dropout" in op_name(node) and argument(node, "train") is False


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers back that the graph writes into (caches, counters)."""
    buffers = list(model.buffers()) if writes_in_place(model) else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


class _Visiting(Interpreter):
    def __init__(self, model: GraphModule, visit: Callable[[Node, Any], Any]) -> None:
        super().__init__(model)
        self.visit = visit

    def run_node(self, n: Node) -> Any:
        return self.visit(n, super().run_node(n))


def snapshot(value: Tensor, *, copy: bool) -> Tensor:
    """Return a tensor to keep: a copy where it may be written into later."""
    return value.detach().clone() if copy else value.detach()
