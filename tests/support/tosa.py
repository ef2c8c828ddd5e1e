"""Lower to a TOSA integer profile; run on Arm's reference model beside the converted graph; count TOSA's operators."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


@dataclass
class OnReference:
    """A converted model's outputs in eager mode and on the reference model, and what the partitioner made of it."""

    eager: list[tuple[Tensor, ...]]
    reference: list[tuple[Tensor, ...]]
    delegates: int
    outside: set[str]
    ops: Counter[str]


@dataclass
class Lowered:
    """An edge program, the TOSA flatbuffer of each delegate, and the ops that stayed outside (without q/dq)."""

    edge: Any
    flatbuffers: list[bytes]
    outside: list[str]

    @property
    def ops(self) -> Counter[str]:
        """How often each TOSA operator stands in the delegates."""
        return sum((_operators(each) for each in self.flatbuffers), Counter())


def lower(converted: GraphModule, batch: tuple[Tensor, ...], profile: str = "TOSA-1.0+INT") -> Lowered:
    """Partition a converted graph by a TOSA profile, with a batch as example."""
    from executorch.backends.arm.tosa import TosaSpecification
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    spec = TosaCompileSpec(TosaSpecification.create_from_string(profile))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        edge = to_edge_transform_and_lower(
            torch.export.export(converted, batch),
            partitioner=[TOSAPartitioner(spec)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    graph = edge.exported_program().graph_module
    called = [n for n in graph.graph.nodes if n.op == "call_function"]
    delegates = [getattr(graph, str(n.args[0].target)) for n in called if "executorch_call_delegate" in str(n.target)]
    outside = [str(n.target) for n in called]
    return Lowered(
        edge,
        [each.processed_bytes for each in delegates],
        [t for t in outside if "delegate" not in t and "getitem" not in t and "quantize_per_tensor" not in t],
    )


def run_on_reference(
    converted: GraphModule, batches: Sequence[tuple[Tensor, ...]], profile: str = "TOSA-1.0+INT"
) -> OnReference:
    """Lower with the first batch as example; run every batch in eager mode and on the reference model."""
    from executorch.backends.arm.test.runner_utils import TosaReferenceModelDispatch

    lowered = lower(converted, batches[0], profile)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        eager = [_as_tuple(converted(*batch)) for batch in batches]
        with TosaReferenceModelDispatch():
            program = lowered.edge.exported_program().module()
            reference = [_as_tuple(program(*batch)) for batch in batches]
    return OnReference(eager, reference, len(lowered.flatbuffers), set(lowered.outside), lowered.ops)


def _operators(flatbuffer: bytes) -> Counter[str]:
    """Return how often each operator stands in a TOSA flatbuffer."""
    from tosa.Op import Op
    from tosa.TosaGraph import TosaGraph

    names = {value: name for name, value in vars(Op).items() if isinstance(value, int)}
    graph = TosaGraph.GetRootAs(flatbuffer, 0)
    regions = [graph.Regions(i) for i in range(graph.RegionsLength())]
    blocks = [region.Blocks(i) for region in regions for i in range(region.BlocksLength())]
    return Counter(names[block.Operators(i).Op()] for block in blocks for i in range(block.OperatorsLength()))


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
