"""Small pieces of the page: chips, tables, names. What is passed in is text, unless it says HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from .measured import decibels
from .overview import level

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .explanation import Explanation

_TALL: Final = 24  # rows beyond which a table scrolls in itself
_FULL_DB: Final = 60.0  # the SQNR at which a meter is full


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        html: what it shows.
        value: what it is sorted by; its text if None. NaN goes last.
    """

    html: str
    value: float | None = None


def chip(text: str, kind: str = "") -> str:
    """Return a small label; `kind` is a class of the style sheet."""
    return f'<span class="chip {kind}">{escape(text)}</span>'


def place(node: str, module: str) -> str:
    """Return a node's name, with its module below it."""
    inside = f"<br><span class=soft>{escape(module)}</span>" if module else ""
    return f"<code>{escape(node)}</code>{inside}"


def heading(text: str, anchor: str) -> str:
    """Return the heading of a section that can be linked to."""
    return f'<h2 id="{anchor}">{escape(text)}</h2>'


def decibel_cell(value: float, *, meter: bool = False) -> Cell:
    """Return a number of dB; with a bar that shows how large it is."""
    shown = decibels(value)
    bar = ""
    if meter and shown:
        width = min(max(value / _FULL_DB, 0.0), 1.0) * 100.0
        bar = f'<span class="meter"><i class="{level(value)}" style="width:{width:.0f}%"></i></span>'
    return Cell(f'<span class="db {level(value)}">{shown}</span>{bar}', value)


def qparams(found: Explanation, name: str) -> str:
    """Return the qparams of a group, with the range that they represent, as HTML."""
    group = found.groups.get(name)
    if group is None or group.numbers is None:
        return f"<span class=soft>{'float' if not name else 'not observed'}</span>"
    numbers = group.numbers
    text = f"<span class=mono>{escape(str(numbers))}</span>"
    if numbers.channels > 1 or numbers.zero_point is None:
        return text
    low = numbers.scale * (numbers.quant_min - numbers.zero_point)
    high = numbers.scale * (numbers.quant_max - numbers.zero_point)
    return f'{text}<br><span class="soft mono">[{low:.4g}, {high:.4g}]</span>'


def table(
    headings: Iterable[str],
    rows: Iterable[Iterable[Cell | str]],
    *,
    label: str,
    ids: Iterable[str] = (),
    sort: bool = False,
    wide: bool = False,
) -> str:
    """Return a table in a box of its own, which scrolls where the table is too wide or too tall.

    Args:
        headings: of its columns.
        rows: of cells; a string is HTML.
        label: what the table is, for those who hear the page.
        ids: the ids of the rows, in order, if they can be linked to.
        sort: let the reader sort it by any column.
        wide: it holds sentences, which need room in a narrow window too.
    """
    listed = [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in rows]
    names = [*ids] or [""] * len(listed)
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in headings)
    body = "".join(
        f"<tr{f' id={name}' if name else ''}>{''.join(map(_td, row))}</tr>"
        for name, row in zip(names, listed, strict=True)
    )
    kinds = f"scroll{' tall' if len(listed) > _TALL else ''}{' wide' if wide else ''}"
    box = f'class="{kinds}" role=region tabindex=0 aria-label="{escape(label)}"'
    kind = " class=sort" if sort else ""
    return f"<div {box}><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _td(cell: Cell) -> str:
    if cell.value is None:
        return f"<td>{cell.html}</td>"
    return f'<td class=num data-v="{"" if math.isnan(cell.value) else cell.value!r}">{cell.html}</td>'
