"""`quantmark sensitivity`: which part of a program bears quantization worst."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from .files import show, whole_file
from .options import Options, backend_config
from .quiet import quiet
from .source import Function, Model, read_model


def sensitivity(
    model: Model = None,
    *,
    function: Function = None,
    backend: Annotated[str, tyro.conf.arg(metavar="NAME")],
    options: Options = (),
    data: Annotated[Path, tyro.conf.arg(metavar="CALIB")],
    test: Annotated[Path | None, tyro.conf.arg(metavar="DATA")] = None,
    by: Literal["block", "family", "module"] = "block",
    json: bool = False,
    node_data: Annotated[Path | None, tyro.conf.arg(metavar="OUT.json")] = None,
) -> None:
    """Measure SQNR at a program's outputs with one part quantized at a time, the worst first.

    Tells what to leave float, or to give 16 bits.

    Args:
        model: the float program, as torch.export.save wrote it.
        function: in its stead a function of yours, which is called (so this runs code): it returns an ExportedProgram,
            or a module and a tuple of example inputs.
        backend: whose rules to follow (see `backends`).
        options: options of the backend, such as activation=int16 (`backends` lists them).
        data: calibration data, as for `quantize`.
        test: other data to measure on; the calibration data by default.
        by: what a part is: a block (or quantized op, or join), a branch family, or a module.
        json: print all of it as JSON.
        node_data: write the numbers for Model Explorer, too.
    """
    config = backend_config(backend, options)
    console = Console()
    with whole_file(node_data) if node_data is not None else nullcontext() as draft:
        program, _ = read_model(model, function)
        with quiet():
            from ..reports import node_data as as_node_data
            from ..workflow import sensitivity as measured
            from .data import Calibration, model_inputs

            inputs = model_inputs(program)
            batches = Calibration(test, inputs) if test is not None else None
            found = measured(program, Calibration(data, inputs), config, batches=batches, by=by)
        if draft is not None:
            draft.write_text(as_node_data(found), encoding="utf-8")
    show(console, found, json=json)
    if node_data is not None:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(node_data), markup=False)
