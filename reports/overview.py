"""The graph in one picture: a row for each block and op, its tensors as lanes, in as many columns as fit the window.

Inline SVG, one piece per column, laid out here: each row has one line of text, cut to the room that it has, so that no
label can meet another however large the model is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

from .explanation import Status
from .lanes import lay_out
from .measured import decibels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .explanation import Explanation, Op
    from .lanes import Placed

WIDTH: Final = 340  # pixels: three pieces side by side on a wide page, one on a telephone
ROW: Final = 18  # pixels from one row to the next
FONT: Final = 11  # pixels
CHARACTER: Final = 0.61 * FONT  # the advance of a monospaced font, a little more than any common one has
_EDGE: Final = 8.0  # from the left of a piece to its first lane
_LANES: Final = 130.0  # the most that lanes may take
_PITCH: Final = 11.0
_DECIBELS: Final = 7  # characters kept free at the right
_SHORT: Final = 24  # fewer rows than this are one piece


@dataclass
class Unit:
    """One row: a block, an op outside blocks, an input or an output; or a module's heading, which has no `name`."""

    name: str
    kind: str
    text: str
    more: str = ""
    reads: tuple[str, ...] = ()
    requantized: frozenset[str] = frozenset()
    is_float: bool = False
    details: list[str] = field(default_factory=list)
    sqnr_db: float = math.nan
    link: str = ""


def overview(found: Explanation, anchors: dict[str, str], headings: dict[str, str]) -> str:
    """Return the graph as a row of SVG pieces.

    Args:
        found: what to draw.
        anchors: op -> the id of its row elsewhere on the page.
        headings: op -> the name of the module that it is listed under.
    """
    units = list(_with_headings(_units(found, anchors), headings))
    rows = {unit.name: row for row, unit in enumerate(units) if unit.name}
    placed = lay_out([(unit.name, unit.reads) for unit in units if unit.name], rows)
    pitch = min(_PITCH, _LANES / (max((each.lane for each in placed.values()), default=0) or 1))
    count = 1 if len(units) <= _SHORT else 3
    size = math.ceil(len(units) / count)
    picture = _Picture(units, placed, pitch)
    pieces = [picture.piece(start, min(start + size, len(units))) for start in range(0, len(units), size)]
    return f'<div class="map">{"".join(pieces)}</div>'


def _units(found: Explanation, anchors: dict[str, str]) -> Iterator[Unit]:
    ops = {op.node: op for op in found.ops}
    blocks = {block.output: block for block in found.blocks}
    inputs = dict.fromkeys(name for op in found.ops for name in op.reads if name not in ops)
    for name in inputs:
        yield Unit(name, "input", name, "input")
    for op in found.ops:
        if op.block and op.block != op.node and op.block in ops:
            continue
        block = blocks.get(op.node)
        members = [ops[node] for node, _ in block.members if node in ops] if block is not None else [op]
        inside = {member.node for member in members}
        edges = [edge for member in members for edge in member.inputs]
        yield Unit(
            op.node,
            f"{op.status.value}{' shared' if op.status is not Status.FLOAT and _shares(found, op) else ''}",
            op.node,
            "" if op.node.rstrip("_0123456789") == (title := block.title if block is not None else op.op) else title,
            tuple(name for member in members for name in member.reads if name not in inside),
            frozenset(edge.value for edge in edges if edge.requantized),
            op.output == "" and op.status is not Status.FUSED,
            list(_details(found, op)),
            found.measured.of(op.node) if found.measured is not None else math.nan,
            anchors.get(op.node, ""),
        )
    for index, name in enumerate(dict.fromkeys(found.outputs)):
        measured = [o.sqnr_db for o in found.measured.outputs if o.node == name] if found.measured is not None else []
        yield Unit(f"\0output {index}", "output", name, "output", (name,), sqnr_db=min(measured, default=math.nan))


def _shares(found: Explanation, op: Op) -> bool:
    group = found.groups.get(op.output)
    return group is not None and len(group.cells) > 1


def _details(found: Explanation, op: Op) -> Iterator[str]:
    yield f"{op.node}: {op.op}, {op.status.value}"
    if op.module:
        yield f"in {op.module}"
    group = found.groups.get(op.output)
    if group is not None:
        yield str(group.numbers or "not observed")
        if len(group.cells) > 1:
            yield f"shares its qparams with {len(group.cells) - 1} more"
    yield from op.why


def _with_headings(units: Iterator[Unit], headings: dict[str, str]) -> Iterator[Unit]:
    """Yield the units with a heading wherever another module begins, unless modules alternate too often."""
    listed = list(units)
    changes, before = [], None
    for index, unit in enumerate(listed):
        heading = headings.get(unit.name, before)
        if heading != before and heading:
            changes.append(index)
        before = heading
    begins = set(changes) if len(changes) <= max(4, len(listed) // 6) else set()
    for index, unit in enumerate(listed):
        if index in begins:
            yield Unit("", "heading", headings[unit.name])
        yield unit


@dataclass
class _Picture:
    units: list[Unit]
    placed: dict[str, Placed]
    pitch: float

    def __post_init__(self) -> None:
        self.left = _EDGE + self.pitch * max((each.lane for each in self.placed.values()), default=0) + 12
        self.unit_of = {unit.name: unit for unit in self.units if unit.name}

    def piece(self, start: int, end: int) -> str:
        """Return rows start..end as one SVG."""
        height = (end - start) * ROW
        parts = [*self._lines(start, end), *self._labels(start, end)]
        return (
            f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="group" '
            f'aria-label="graph, part of rows {start + 1} to {end}">{"".join(parts)}</svg>'
        )

    def _x(self, lane: int) -> float:
        return round(_EDGE + lane * self.pitch, 1)

    def _lines(self, start: int, end: int) -> Iterator[str]:
        top = -start * ROW + ROW / 2
        for each in self.placed.values():
            x, soft = self._x(each.lane), " f" if self.unit_of[each.name].is_float else ""
            if each.row < end and each.last - 1 >= start and each.last - 1 > each.row:
                first, last = max(each.row, start - 1), min(each.last - 1, end)
                yield f'<path class="e{soft}" d="M{x} {first * ROW + top:g}V{last * ROW + top:g}"/>'
            if start <= each.row <= end:
                yield from self._arrivals(each, top)

    def _arrivals(self, each: Placed, top: float) -> Iterator[str]:
        x, y = self._x(each.lane), each.row * ROW + top
        for name in each.sources:
            source = self.unit_of[name]
            above = self._x(self.placed[name].lane)
            kind = " r" if name in self.unit_of[each.name].requantized else " f" if source.is_float else ""
            curve = f"V{y:g}" if above == x else f"C{above} {y - ROW / 2:g} {x} {y - ROW / 2:g} {x} {y:g}"
            yield f'<path class="e{kind}" d="M{above} {y - ROW:g}{curve}"/>'

    def _labels(self, start: int, end: int) -> Iterator[str]:
        for row, unit in enumerate(self.units[start:end]):
            y = row * ROW + ROW / 2
            if not unit.name:
                room = int((WIDTH - self.left) / CHARACTER)
                yield f'<text class="h" x="{self.left:g}" y="{y + 4:g}">{escape(cut(unit.text, room))}</text>'
                continue
            mark = _mark(unit, self._x(self.placed[unit.name].lane), y)
            title = escape("\n".join(unit.details)) if unit.details else escape(unit.text)
            inner = f"<title>{title}</title>{mark}{self._text(unit, y)}"
            # Not among the tab stops, which would be hundreds: the rows that they lead to are all in the last section.
            yield f'<a href="#{unit.link}" tabindex="-1">{inner}</a>' if unit.link else f"<g>{inner}</g>"

    def _text(self, unit: Unit, y: float) -> str:
        shown = decibels(unit.sqnr_db)
        room = int((WIDTH - self.left) / CHARACTER) - _DECIBELS
        name = cut(unit.text, room)
        more = cut(unit.more, room - len(name) - 1) if room - len(name) > 4 else ""
        text = f'<text x="{self.left:g}" y="{y + 4:g}">{escape(name)}'
        text += f'<tspan class="m" dx="{CHARACTER:.1f}">{escape(more)}</tspan></text>' if more else "</text>"
        if shown:
            text += f'<text class="d {level(unit.sqnr_db)}" x="{WIDTH - 4}" y="{y + 4:g}">{shown}</text>'
        return text


def cut(text: str, room: int) -> str:
    """Return a text of at most so many characters, its end replaced by an ellipsis where it is longer."""
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…" if room > 0 else ""


def level(value: float) -> str:
    """Return how good an SQNR in dB is, as a class of the style sheet: "low" is below 20 dB, "mid" below 30."""
    if math.isnan(value):
        return ""
    return "low" if value < 20.0 else "mid" if value < 30.0 else "high"


def _mark(unit: Unit, x: float, y: float) -> str:
    status = unit.kind.partition(" ")[0]
    if status == "block":
        shape = f'<rect x="{x - 4.5:g}" y="{y - 4.5:g}" width="9" height="9" rx="2"'
    elif status == "joined":
        shape = f'<path d="M{x} {y - 5.5:g}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"'
    elif status in {"input", "output"}:
        shape = f'<path d="M{x - 4.5:g} {y - 3.5:g}h9l-4.5 7z"'
    else:
        shape = f'<circle cx="{x}" cy="{y:g}" r="{2.6 if status == "moved" else 4}"'
    return f'{shape} class="k {unit.kind}"/>'
