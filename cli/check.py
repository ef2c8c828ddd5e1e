"""`quantmark check`: what a quantized program does wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .files import load_program, load_ranges, step
from .options import Options, config_if_given
from .quiet import quiet

if TYPE_CHECKING:
    from ..checks import Report

UNSAFE = 1  # the exit status where something was found that breaks the lowered model


def check(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL.pt2")],
    *,
    backend: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    options: Options = (),
    ranges: Annotated[Path | None, tyro.conf.arg(metavar="RANGES.json")] = None,
    suppress: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="CODE[:NODE]", help_behavior_hint="(may be given several times)"),
    ] = (),
    json: bool = False,
) -> int:
    """Check a quantized program of any PT2E quantizer. Exit status 1 if it is unsafe, 2 if it can't be read.

    Args:
        model: the quantized program, as torch.export.save wrote it.
        backend: hold it against this backend's rules (see `backends`); by default against those of any.
        options: options of the backend, such as activation=int16 (`backends` lists them).
        ranges: a table that `ranges` measured on the float program: qparams that serve the values badly are found too.
        suppress: findings to leave out, as QM201 or QM201:relu_*.
        json: print the findings as JSON.
    """
    config = config_if_given(backend, options)
    table = load_ranges(ranges) if ranges is not None else None
    program = load_program(model)
    with step("Checking"), quiet():
        from ..checks import check as find

        report = find(program, config, table, suppress=suppress)
    console = Console()
    if json:
        console.out(report.to_json(), highlight=False)
    elif console.is_terminal and report.findings:
        console.print(findings_table(report))
        console.print(report.summary())
    else:
        console.out(str(report), highlight=False)
    return 0 if report.is_safe else UNSAFE


def findings_table(report: Report) -> Table:
    """Return the findings as a table for a terminal, with how to mend each."""
    styles = {"error": "bold red", "warning": "yellow", "info": "dim"}
    table = Table(box=box.SIMPLE_HEAD, show_lines=False)
    for heading in ("", "code", "node", "module", "finding"):
        table.add_column(heading, overflow="fold", ratio=1 if heading == "finding" else None)
    for found in report.findings:
        text = Text(f"{found.message}. ")
        text.append(f"{found.mend}.", "italic dim")
        severity = Text(found.severity.value, styles[found.severity.value])
        table.add_row(severity, found.code, Text(found.node), Text(found.module_path), text)
    return table
