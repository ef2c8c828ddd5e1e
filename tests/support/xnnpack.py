"""Lower to XNNPACK, run on the ExecuTorch runtime, and compare with the converted graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from quantmark.cli.lowering import Lowered, lower_to_xnnpack, run_program


@dataclass
class OnRuntime:
    """A converted model's outputs in eager mode and on the runtime, for the same batches."""

    lowered: Lowered
    eager: list[tuple[Tensor, ...]]
    runtime: list[tuple[Tensor, ...]]


def run_both(
    converted: GraphModule, batches: Sequence[tuple[Tensor, ...]], folder: Path, *, dynamic: Any = None
) -> OnRuntime:
    """Lower with the first batch as example; run every batch in eager mode and on the runtime."""
    lowered = lower_to_xnnpack(converted, batches[0], dynamic)
    program = folder / "model.pte"
    program.write_bytes(lowered.buffer)
    with torch.no_grad():
        eager = [_as_tuple(converted(*batch)) for batch in batches]
    return OnRuntime(lowered, eager, run_program(program, batches))


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
