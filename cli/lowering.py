"""From a converted graph to a program on the ExecuTorch runtime, through XNNPACK."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..observers.errors import InputError
from .quiet import quiet_native

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch.fx import Graph


@dataclass(frozen=True)
class Lowered:
    """A program as `to_executorch` writes it.

    Args:
        buffer: the bytes of the .pte file.
        delegates: how many parts XNNPACK runs.
        outside: the names of the ops that portable kernels run.
    """

    buffer: bytes
    delegates: int
    outside: tuple[str, ...]


def lower_to_xnnpack(model: nn.Module, example: Sequence[Tensor], dynamic_shapes: Any = None) -> Lowered:
    """Export a float or converted model and lower it with the XNNPACK partitioner."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    exported = torch.export.export(model, tuple(example), dynamic_shapes=dynamic_shapes)
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    delegates, outside = _count(edge.exported_program().graph)
    return Lowered(bytes(edge.to_executorch().buffer), delegates, outside)


def _count(graph: Graph) -> tuple[int, tuple[str, ...]]:
    names = [str(n.target) for n in graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    outside = tuple(name for name in names if "executorch_call_delegate" not in name)
    return len(names) - len(outside), outside


def run_program(program: Path, batches: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Run a .pte file on each batch and return its outputs.

    Raises:
        InputError: if the runtime was built without XNNPACK.
    """
    from executorch.runtime import Runtime

    with quiet_native():  # it reports on the processor
        runtime = Runtime.get()
    if not runtime.backend_registry.is_available("XnnpackBackend"):
        raise InputError("this build of executorch has no XNNPACK backend in its runtime")
    with quiet_native():
        method = runtime.load_program(program).load_method("forward")
    if method is None:
        raise InputError(f"{program} holds no method `forward`")
    return [tuple(output.clone() for output in method.execute(list(batch))) for batch in batches]
