"""`quantmark quantize`: from a float program to a quantized one, checked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..observers.errors import InputError
from .check import UNSAFE, findings_table
from .files import note, step, whole_file
from .options import Options, backend_config
from .source import Function, Model, read_model


def quantize(
    model: Model = None,
    *,
    function: Function = None,
    backend: Annotated[str, tyro.conf.arg(metavar="NAME")],
    options: Options = (),
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="OUT.pt2")],
    data: Annotated[Path | None, tyro.conf.arg(metavar="CALIB")] = None,
    ranges: Annotated[Path | None, tyro.conf.arg(metavar="RANGES.json")] = None,
    report: Annotated[Path | None, tyro.conf.arg(metavar="OUT.html")] = None,
) -> int:
    """Quantize a float program for a backend and check the result. Exit status 1 if that is unsafe (and written).

    Args:
        model: the float program, as torch.export.save wrote it.
        function: in its stead a function of yours, which is called (so this runs code): it returns an ExportedProgram,
            or a module and a tuple of example inputs.
        backend: whose rules to follow (see `backends`).
        options: options of the backend, such as activation=int16 (`backends` lists them).
        output: where the quantized program goes, ready to be lowered. Written whole, or not at all.
        data: calibration data: .npz, .safetensors, .pt (tensors only), or a folder of them, each file a batch. Arrays
            are named as the model's inputs, or in their order. Needed unless there are --ranges.
        ranges: a table that `ranges` measured, or that was written by hand; decides instead of the data.
        report: one HTML page on what was done and why, SQNR on the data, and what the checks found.
    """
    config = backend_config(backend, options)
    if data is None and ranges is None:
        raise InputError("nothing to quantize by: give --data, --ranges or both")
    with ExitStack() as files:
        draft = files.enter_context(whole_file(output))
        page_draft = files.enter_context(whole_file(report)) if report else None
        program, title = read_model(model, function)
        from ..reports.words import counted
        from .run import explained, export_again, run_quantizer, save

        done = run_quantizer(program, config, data, ranges)
        with step("Exporting the quantized model"):
            save(export_again(done, program), draft)
        if page_draft is not None:
            from ..reports.page import page

            found = explained(done, program, data)
            page_draft.write_text(page(found, done.report, title=title), encoding="utf-8")
    for message in done.record.messages:
        note(f"note: {message}")
    console = Console()
    if console.is_terminal and done.report.findings:
        console.print(findings_table(done.report))
    else:
        console.out("\n".join(str(finding) for finding in done.report.findings), highlight=False)
    blocks, decisions = done.record.blocks, done.record.decisions
    counts = f"{counted(len(blocks), 'blocks')}, {counted(len(decisions), 'decisions')}"
    console.out(f"{counts}; {done.report.summary()}", highlight=False)
    console.out("\n".join(str(path) for path in (output, report) if path is not None), highlight=False)
    return 0 if done.report.is_safe else UNSAFE
