"""An explanation as text: tables for a terminal, plain lines for anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from .measured import decibels
from .words import ROOT, counted, loss_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ..observers.rules import Decision
    from .explanation import Explanation, Op

_STYLES: Final = {
    "block": "bold green",
    "fused": "green",
    "quantized": "bold green",
    "moved": "cyan",
    "joined": "cyan",
    "float": "yellow",
}
_DECIBELS: Final = "SQNR dB"


def tables(found: Explanation) -> Iterator[RenderableType]:
    """Yield the tables and lines of an explanation, for a rich console."""
    table = Table(box=box.SIMPLE_HEAD, title=_title(found), title_justify="left", title_style="bold")
    for heading in _headings(found):
        side: Literal["right", "left"] = "right" if heading == _DECIBELS else "left"
        table.add_column(heading, overflow="fold", no_wrap=heading in {"what", "output"}, justify=side)
    for row in _rows(found):
        table.add_row(*map(Text, row[:3]), Text(row[3], _STYLES[row[3]]), *map(Text, row[4:]))
    yield table
    if found.decisions:
        yield _decision_table(found)
    for message in found.messages:
        yield Text(f"! {message}", "yellow")
    yield Text(_summary(found))


def plain(found: Explanation) -> str:
    """Return an explanation as aligned plain text, one op a line."""
    lines = [_title(found), *_aligned([_headings(found), *_rows(found)])]
    if found.decisions:
        rows = [(d.kind, d.where, d.outcome.value, loss_words(d), _reason(d)) for d in found.decisions]
        lines += ["", *_aligned([("decision", "on", "outcome", "largest loss", "why"), *rows])]
    lines += [f"! {message}" for message in found.messages]
    return "\n".join([*lines, "", _summary(found)])


def _title(found: Explanation) -> str:
    seen, all_cells = found.observed
    state = "ranges observed" if seen == all_cells else f"{seen} of {all_cells} activations observed"
    return f"{found.backend or 'no global config'}: {counted(len(found.ops), 'ops')}, {state}"


def _headings(found: Explanation) -> tuple[str, ...]:
    return ("module", "node", "op", "what", "output", *([_DECIBELS] if found.measured is not None else []), "why")


def _rows(found: Explanation) -> Iterator[tuple[str, ...]]:
    for module, ops in found.modules().items():
        for index, op in enumerate(ops):
            heading = (module or ROOT) if index == 0 else ""
            measured = [] if found.measured is None else [decibels(found.measured.of(op.node))]
            yield heading, op.node, op.op, op.status.value, _output(found, op), *measured, "; ".join(op.why)


def _output(found: Explanation, op: Op) -> str:
    if not op.output:
        return "" if op.status.value == "fused" else "float"
    group = found.groups.get(op.output)
    if group is None:
        return "another quantizer's"
    numbers = str(group.numbers) if group.numbers else "not observed"
    first = next(iter(group.values), op.node)
    return numbers if first == op.node else f"{numbers}, as {first}"


def _decision_table(found: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Decisions", title_justify="left", title_style="bold")
    for heading in ("kind", "on", "outcome", "largest loss", "why"):
        table.add_column(heading, overflow="fold", ratio=2 if heading == "why" else None)
    for decision in found.decisions:
        style = "bold yellow" if decision.finding else ""
        cells = (decision.kind, decision.where, decision.outcome.value, loss_words(decision), _reason(decision))
        table.add_row(*map(Text, cells), style=style)
    return table


def _reason(decision: Decision) -> str:
    parts = [decision.reason, *(f"not {outcome.lower()}: {why}" for outcome, why in decision.rejected)]
    return "; ".join([*parts, *decision.notes])


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines, all columns but the last padded to one width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def _summary(found: Explanation) -> str:
    counts = ", ".join(counted(count, what) for what, count in found.counts().items() if count)
    if found.measured is None or not found.measured.outputs:
        return counts
    outputs = ", ".join(f"{each.node} {decibels(each.sqnr_db)}" for each in found.measured.outputs)
    return f"{counts}\nSQNR of the outputs in dB: {outputs}"
