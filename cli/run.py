"""What `quantize` and `explain` have in common: one run of a quantizer over a program from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..annotators.batches import is_quantized
from ..observers.errors import InputError
from .data import Calibration, model_inputs
from .files import load_ranges, note
from .quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram

    from ..annotators.quantizer import BackendQuantizer
    from ..configs.base import BackendConfig
    from ..reports import Explanation
    from ..workflow import Quantized


def run_quantizer(program: ExportedProgram, config: BackendConfig, data: Path | None, ranges: Path | None) -> Quantized:
    """Quantize a program by data, or by a table of ranges (then the data is read for nothing but its form)."""
    table = load_ranges(ranges) if ranges is not None else None
    batches = Calibration(data, model_inputs(program)) if data is not None else None
    if batches is not None and batches.note:
        note(batches.note)
    with quiet():
        from ..annotators.quantizer import BackendQuantizer
        from ..workflow import quantize

        return quantize(program, batches if batches is not None else (), BackendQuantizer(config, table))


def explained(done: Quantized, program: ExportedProgram, data: Path | None) -> Explanation:
    """Explain what was done to a program; with data, SQNR is measured on them too."""
    with quiet():
        from ..reports import explain
        from ..workflow import measure_sqnr

        measured = None
        if data is not None:
            measured = measure_sqnr(program, done, Calibration(data, model_inputs(program)))
        return explain(done.model, measured)


def annotate(program: ExportedProgram, config: BackendConfig) -> BackendQuantizer:
    """Return the quantizer that annotated a program which nothing has been observed of."""
    if is_quantized(program.graph):
        raise InputError("the model is quantized already; give the float model")
    with quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        from ..annotators.quantizer import BackendQuantizer

        quantizer = BackendQuantizer(config)
        prepare_pt2e(program.module(), quantizer)
    return quantizer


def export_again(done: Quantized, program: ExportedProgram) -> ExportedProgram:
    """Export the quantized model with the inputs and the varying sizes of the float program."""
    if program.example_inputs is None:
        raise InputError("the program holds no example inputs; save it as torch.export.export returned it")
    arguments, _ = program.example_inputs
    shapes = varying_sizes(program)
    with quiet():
        return torch.export.export(done.model, tuple(arguments), dynamic_shapes=shapes)


def save(program: ExportedProgram, path: Path) -> None:
    """Write a program to a file."""
    with quiet():
        torch.export.save(program, path)


def varying_sizes(program: ExportedProgram) -> tuple[dict[int, Any], ...] | None:
    """Return which sizes of the inputs vary, as `torch.export.export` takes it, or None if none does."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    known: dict[str, Any] = {}
    found: list[dict[int, Any]] = []
    for name in program.graph_signature.user_inputs:
        shape = nodes[str(name)].meta["val"].shape
        found.append({axis: _dim(s, program, known) for axis, s in enumerate(shape) if not isinstance(s, int)})
    return tuple(found) if any(found) else None


def _dim(size: Any, program: ExportedProgram, known: dict[str, Any]) -> Any:
    """Return a named dimension for a symbol, the same for each of its uses; sums and products are found anew."""
    symbol = size.node.expr
    limits = program.range_constraints.get(symbol)
    if limits is None or not symbol.is_Symbol:
        return torch.export.Dim.AUTO
    if str(symbol) not in known:
        low, high = int(limits.lower), float(limits.upper)
        known[str(symbol)] = torch.export.Dim(str(symbol), min=low, max=int(high) if high < 2**31 else None)
    return known[str(symbol)]
