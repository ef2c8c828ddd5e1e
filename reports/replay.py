"""Run a graph node by node, and look at every value on the way. The graph's buffers are as before afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from ..annotators.graph import is_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Node

_SEED = 0  # so that a float graph and its quantized twin draw the same random numbers, where they draw any


def replay(model: GraphModule, inputs: Sequence[Any], visit: Callable[[Node, Any], Any]) -> Any:
    """Return the model's outputs; each node's value is what `visit` makes of it."""
    return replay_with(_Visiting(model, visit), inputs)


def replay_with(interpreter: Interpreter, inputs: Sequence[Any]) -> Any:
    """Return the outputs of an interpreter's model."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _unchanged(interpreter.module):
        torch.manual_seed(_SEED)
        return interpreter.run(*inputs)


def writes_in_place(model: nn.Module) -> bool:
    """Tell whether a node of a graph module may change a value after it was computed."""
    nodes = model.graph.nodes if isinstance(model, GraphModule) else ()
    return any(node.op == "call_function" and is_in_place(node) for node in nodes)


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
