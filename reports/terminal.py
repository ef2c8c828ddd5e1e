"""An explanation as text: tables for a terminal, plain lines for anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

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
_HEADINGS: Final = ("module", "node", "op", "what", "output", "why")
_ROOT: Final = "(root)"


def tables(found: Explanation) -> Iterator[RenderableType]:
    """Yield the tables and lines of an explanation, for a rich console."""
    table = Table(box=box.SIMPLE_HEAD, title=_title(found), title_justify="left", title_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold", no_wrap=heading in {"what", "output"})
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
    lines = [_title(found), *_aligned([_HEADINGS, *_rows(found)])]
    if found.decisions:
        rows = [(d.kind, d.where, d.outcome.value, _worst(d), _reason(d)) for d in found.decisions]
        lines += ["", *_aligned([("decision", "on", "outcome", "worst loss", "why"), *rows])]
    lines += [f"! {message}" for message in found.messages]
    return "\n".join([*lines, "", _summary(found)])


def _title(found: Explanation) -> str:
    seen, all_cells = found.observed
    state = "ranges observed" if seen == all_cells else f"{seen} of {all_cells} activations observed"
    return f"{found.backend or 'no global config'}: {len(found.ops)} ops, {state}"


def _rows(found: Explanation) -> Iterator[tuple[str, ...]]:
    for module, ops in found.modules().items():
        for index, op in enumerate(ops):
            heading = (module or _ROOT) if index == 0 else ""
            yield heading, op.node, op.op, op.status.value, _output(found, op), "; ".join(op.why)


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
    for heading in ("kind", "on", "outcome", "worst loss", "why"):
        table.add_column(heading, overflow="fold", ratio=2 if heading == "why" else None)
    for decision in found.decisions:
        style = "bold yellow" if decision.finding else ""
        cells = (decision.kind, decision.where, decision.outcome.value, _worst(decision), _reason(decision))
        table.add_row(*map(Text, cells), style=style)
    return table


def _worst(decision: Decision) -> str:
    return f"{decision.worst_loss_db:.2f} dB" if decision.losses_db else ""


def _reason(decision: Decision) -> str:
    parts = [decision.reason, *(f"not {outcome.lower()}: {why}" for outcome, why in decision.rejected)]
    return "; ".join([*parts, *decision.notes])


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines, all columns but the last padded to one width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def _summary(found: Explanation) -> str:
    return ", ".join(f"{count} {what}" for what, count in found.counts().items() if count)
