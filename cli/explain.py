"""`quantmark explain`: what a backend's config makes of a program, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from .files import show, step, whole_file
from .options import Options, backend_config
from .quiet import quiet
from .source import Function, Model, read_model

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ..checks import Report
    from ..configs.base import BackendConfig
    from ..reports import Explanation


def explain(
    model: Model = None,
    *,
    function: Function = None,
    backend: Annotated[str, tyro.conf.arg(metavar="NAME")],
    options: Options = (),
    data: Annotated[Path | None, tyro.conf.arg(metavar="CALIB")] = None,
    ranges: Annotated[Path | None, tyro.conf.arg(metavar="RANGES.json")] = None,
    json: bool = False,
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="OUT.html")] = None,
) -> None:
    """Tell what is quantized, fused, shared, requantized and left float in a float program, and why.

    Without --data and --ranges it tells what would be annotated; with either also what is decided, and the qparams;
    with --data also the SQNR of each tensor on them.

    Args:
        model: the float program, as torch.export.save wrote it.
        function: in its stead a function of yours, which is called (so this runs code): it returns an ExportedProgram,
            or a module and a tuple of example inputs.
        backend: whose rules to follow (see `backends`).
        options: options of the backend, such as activation=int16 (`backends` lists them).
        data: calibration data, as for `quantize`.
        ranges: a table that `ranges` measured, or that was written by hand.
        json: print all of it as JSON.
        output: write it as one HTML page instead.
    """
    config = backend_config(backend, options)
    program, title = read_model(model, function)
    console = Console()
    if output is None:
        found, _ = _explained(program, config, data, ranges)
        show(console, found, json=json)
        return
    with whole_file(output) as draft:
        from ..reports.page import page

        found, report = _explained(program, config, data, ranges)
        draft.write_text(page(found, report, title=title), encoding="utf-8")
    console.out(str(output), highlight=False)


def _explained(
    program: ExportedProgram, config: BackendConfig, data: Path | None, ranges: Path | None
) -> tuple[Explanation, Report | None]:
    """Return what is done to the program, and what the checks find where there is enough to convert it."""
    with step("Starting"), quiet():
        from ..reports import explain as of_quantizer
        from .run import annotate, explained, run_quantizer

    if data is None and ranges is None:
        with step("Annotating"):
            return of_quantizer(annotate(program, config)), None
    done = run_quantizer(program, config, data, ranges)
    return explained(done, program, data), done.report
