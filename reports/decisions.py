"""What was decided on branches and joins, as cards of the page: the members' ranges as bars on one axis."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from .axis import Axis
from .html import chip
from .measured import decibels
from .style import GROUP_COLOURS
from .words import loss_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..observers.rules import Decision
    from .explanation import Explanation

_OPEN: Final = 8  # more decisions than this are folded, but for those to look at


def decision_card(found: Explanation, index: int) -> str:
    """Return a decision as HTML: outcome, cost, reasons, and the plot."""
    decision = found.decisions[index]
    rejected = "".join(
        f"<li>not <b>{escape(outcome.lower())}</b>: {escape(why)}</li>" for outcome, why in decision.rejected
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in decision.notes)
    more = f"<ul>{rejected}{notes}</ul>" if rejected or notes else ""
    words = loss_words(decision)
    loss = chip(f"largest predicted loss {words}") if words else ""
    look = chip("costs more than its budget", "warning") if decision.finding else ""
    shown = " open" if decision.finding or len(found.decisions) <= _OPEN else ""
    return (
        f'<details class="card{" look" if decision.finding else ""}"{shown}><summary class="head">'
        f"<h3><code>{escape(decision.where)}</code></h3>{chip(decision.kind)}"
        f"{chip(decision.outcome.value, 'outcome')}{loss}{look}</summary>"
        f"<p>{escape(decision.reason)}</p>{more}{_plot(found, index)}</details>"
    )


def _plot(found: Explanation, at: int) -> str:
    """Return the members' ranges as bars on one axis, linear and logarithmic, coloured by group."""
    decision = found.decisions[at]
    if not decision.ranges:
        return ""
    ranges = [range_ for _, range_ in decision.ranges]
    linear, log = Axis.of(ranges), Axis.of(ranges, log=True)
    group_of = _group_numbers(found, decision)
    rows = [_titles(found)]
    for name, (low, high) in decision.ranges:
        index = group_of.get(name)
        colour = "float-bar" if index is None else f"g{index % GROUP_COLOURS}"
        places = f"--a:{linear.percent(low):.2f};--w:{linear.percent(high) - linear.percent(low):.2f};"
        places += f"--la:{log.percent(low):.2f};--lw:{log.percent(high) - log.percent(low):.2f}"
        rows.append(
            f'<div class="row"><code class="name" title="{escape(name)}">{escape(_label(name))}</code>'
            f'<div class="track">{_zero(linear, log)}<div class="bar {colour}" style="{places}"></div></div>'
            f'<div class="numbers"><span>[{low:.4g}, {high:.4g}]</span>{_group(found, name, index)}'
            f"{_decibels(found, at, name, quantized=index is not None)}</div></div>"
        )
    ticks = "".join(_ticks(linear, "linear")) + "".join(_ticks(log, "log"))
    rows.append(f'<div class="row"><span class="name"></span><div class="axis">{ticks}</div></div>')
    return f'<div class="plot{" measured" if found.measured is not None else ""}">{"".join(rows)}</div>'


def _titles(found: Explanation) -> str:
    """Return the headings of the numbers beside the bars."""
    titles = ["range", "group", "predicted", *(["measured", "SQNR"] if found.measured is not None else [])]
    kinds = ["", "group", "loss", "loss", "loss"]
    cells = "".join(f'<span class="{kind}">{title}</span>' for kind, title in zip(kinds, titles, strict=False))
    return (
        f'<div class="row titles" aria-hidden="true"><span></span><span></span><div class="numbers">{cells}</div></div>'
    )


def _group(found: Explanation, name: str, index: int | None) -> str:
    text = "float" if index is None else f'<b class="t{index % GROUP_COLOURS}">{_group_name(found, name, index)}</b>'
    return f'<span class="group">{text}</span>'


def _decibels(found: Explanation, at: int, cell: str, *, quantized: bool) -> str:
    """Return the predicted and measured loss of a member, and the SQNR of its values as they are read."""
    predicted = dict(found.decisions[at].losses_db).get(cell) if quantized else None
    parts = [("predicted loss", _loss(predicted))]
    if found.measured is not None:
        losses = found.measured.losses_db[at] if at < len(found.measured.losses_db) else {}
        sqnr = found.measured.of(_label(cell).partition("->")[0])
        parts.append(("measured loss", _loss(losses.get(cell)) if predicted is not None else ""))
        parts.append(("SQNR", f"{decibels(sqnr)} dB" if math.isfinite(sqnr) else decibels(sqnr)))
    return "".join(f'<span class="loss" title="{title}" data-t="{title}">{text}</span>' for title, text in parts)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:.2f} dB"


def _group_name(found: Explanation, cell: str, number: int) -> str:
    """Return "group 1", with its dtype where that is not int8."""
    numbers = next((group.numbers for group in found.groups.values() if cell in group.cells), None)
    dtype = "" if numbers is None or numbers.dtype == "int8" else f"{numbers.dtype} "
    return f"{dtype}group {number + 1}"


def _group_numbers(found: Explanation, decision: Decision) -> dict[str, int]:
    """Return the number of each quantized member's group, from 0: the decision's groups first, then any others."""
    group_of = {cell: name for name, group in found.groups.items() for cell in group.cells}
    members = [name for group in decision.groups for name in group]
    members += [name for name, _ in decision.ranges if name not in members]
    numbers: dict[str, int] = {}
    for name in members:
        if name in group_of:
            numbers.setdefault(group_of[name], len(numbers))
    return {name: numbers[group_of[name]] for name in members if name in group_of}


def _zero(linear: Axis, log: Axis) -> str:
    return f'<div class="zero" style="--a:{linear.percent(0.0):.2f};--la:{log.percent(0.0):.2f}"></div>'


def _ticks(axis: Axis, kind: str) -> Iterator[str]:
    for tick in axis.ticks():
        yield f'<span class="tick {kind}" style="--a:{axis.percent(tick):.2f}">{tick:g}</span>'


def _label(cell: str) -> str:
    """Return the name of a cell without what only tells schemes apart."""
    return cell.partition("@")[0]
