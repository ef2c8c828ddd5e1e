"""Compile for an Ethos-U with Vela, and read off what it costs there."""

from __future__ import annotations

import contextlib
import csv
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from support.tosa import Lowered, lower


@dataclass
class Compiled:
    """What Vela says of a model.

    Args:
        cycles: of one inference, NPU and memory.
        npu: of them, those of the NPU.
        sram_kib: of the largest delegate.
        rescales: RESCALE operators in the TOSA graphs.
        clamps: CLAMP operators in the TOSA graphs.
        delegates: partitions.
        outside: ops that stayed on the CPU, without quantize and dequantize.
    """

    cycles: int
    npu: int
    sram_kib: float
    rescales: int
    clamps: int
    delegates: int
    outside: list[str]


def compile_for(converted: GraphModule, batch: tuple[Tensor, ...], target: str) -> Compiled:
    """Lower and compile a converted graph for a target ("ethos-u55-128", "ethos-u85-256", ...)."""
    spec = _spec(target)
    return measure(lower(converted, batch, str(spec.tosa_spec)), target)


def measure(lowered: Lowered, target: str) -> Compiled:
    """Compile what was lowered; the cycles of delegates add up."""
    flags = list(_spec(target).compiler_flags)
    found = [_vela(each, flags) for each in lowered.flatbuffers]
    return Compiled(
        cycles=sum(int(float(row["cycles_total"])) for row in found),
        npu=sum(int(float(row["cycles_npu"])) for row in found),
        sram_kib=max((float(row["sram_memory_used"]) for row in found), default=0.0),
        rescales=lowered.ops["RESCALE"],
        clamps=lowered.ops["CLAMP"],
        delegates=len(lowered.flatbuffers),
        outside=lowered.outside,
    )


def ethos_quantizer(target: str, *, bits: int = 8, weight_bits: int = 8) -> Quantizer:
    """Return executorch's own quantizer for a target, with its config of int8, 16-bit activations or 4-bit weights."""
    from executorch.backends.arm.quantizer.arm_quantizer import (
        EthosUQuantizer,
        get_symmetric_a8w4_quantization_config,
        get_symmetric_a16w8_quantization_config,
        get_symmetric_quantization_config,
    )

    configs: dict[tuple[int, int], Callable[[], Any]] = {
        (8, 8): get_symmetric_quantization_config,
        (16, 8): get_symmetric_a16w8_quantization_config,
        (8, 4): get_symmetric_a8w4_quantization_config,
    }
    return EthosUQuantizer(_spec(target)).set_global(configs[bits, weight_bits]())


def profile_of(target: str) -> str:
    """Return the TOSA profile that executorch lowers to for a target."""
    return str(_spec(target).tosa_spec)


def _spec(target: str) -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec

    return EthosUCompileSpec(target)


def _vela(flatbuffer: bytes, flags: list[str]) -> dict[str, str]:
    """Run Vela on one TOSA flatbuffer and return its summary."""
    from ethosu.vela import vela

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.tosa"
        path.write_bytes(flatbuffer)
        with contextlib.redirect_stdout(io.StringIO()):
            vela.main([*flags, f"--output-dir={folder}", str(path)])
        (summary,) = Path(folder).glob("*summary*.csv")
        with summary.open() as file:
            return next(csv.DictReader(file))
