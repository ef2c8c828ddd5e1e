"""`quantmark ranges`: measure a float program's ranges once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from .files import note, step, whole_file
from .options import Options, config_if_given
from .quiet import quiet
from .source import Function, Model, read_model


def ranges(
    model: Model = None,
    *,
    function: Function = None,
    data: Annotated[Path, tyro.conf.arg(metavar="CALIB")],
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="RANGES.json")],
    estimator: Literal["histogram", "minmax"] = "histogram",
    backend: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    options: Options = (),
) -> None:
    """Measure the range of every float tensor of a program, for `quantize --ranges`.

    Args:
        model: the float program, as torch.export.save wrote it.
        function: in its stead a function of yours, which is called (so this runs code): it returns an ExportedProgram,
            or a module and a tuple of example inputs.
        data: calibration data: .npz, .safetensors, .pt (tensors only), or a folder of them, each file a batch. Arrays
            are named as the model's inputs, or in their order.
        output: where the table goes, as JSON that can be read and edited.
        estimator: keep a histogram of each tensor too, or its minimum and maximum alone.
        backend: the backend that the table is for: the parts of the ops that it takes apart are measured too (Arm).
        options: options of the backend, such as activation=int16 (`backends` lists them).
    """
    config = config_if_given(backend, options)
    with whole_file(output) as draft:
        program, _ = read_model(model, function)
        with step("Starting"), quiet():
            from ..annotators.measure import observe_ranges
            from ..annotators.quantizer import BackendQuantizer
            from ..workflow import track
            from .data import Calibration, model_inputs

        with quiet():
            batches = Calibration(data, model_inputs(program))
            quantizer = BackendQuantizer(config) if config else None
            measured = track(batches, "Measuring")
            table = observe_ranges(program, measured, estimator=estimator, quantizer=quantizer)
        draft.write_text(table.to_json(), encoding="utf-8")
    if batches.note:
        note(batches.note)
    note(f"{len(table)} ranges from {len(batches.files)} file(s): {output}")
