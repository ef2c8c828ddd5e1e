"""Lower to TOSA's integer profile, run on Arm's reference model, and compare with the converted graph."""

from __future__ import annotations

import warnings
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


def run_on_reference(
    converted: GraphModule, batches: Sequence[tuple[Tensor, ...]], profile: str = "TOSA-1.0+INT"
) -> OnReference:
    """Lower with the first batch as example; run every batch in eager mode and on the reference model."""
    from executorch.backends.arm.test.runner_utils import TosaReferenceModelDispatch
    from executorch.backends.arm.tosa import TosaSpecification
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    spec = TosaCompileSpec(TosaSpecification.create_from_string(profile))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        edge = to_edge_transform_and_lower(
            torch.export.export(converted, batches[0]),
            partitioner=[TOSAPartitioner(spec)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        called = [str(n.target) for n in edge.exported_program().graph_module.graph.nodes if n.op == "call_function"]
        delegates = sum("executorch_call_delegate" in target for target in called)
        outside = {t for t in called if "delegate" not in t and "getitem" not in t and "quantize_per_tensor" not in t}
        eager = [_as_tuple(converted(*batch)) for batch in batches]
        with TosaReferenceModelDispatch():
            program = edge.exported_program().module()
            reference = [_as_tuple(program(*batch)) for batch in batches]
    return OnReference(eager, reference, delegates, outside)


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
