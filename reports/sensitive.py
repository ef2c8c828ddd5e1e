"""What `sensitivity` returns: SQNR at the outputs with one part of a model quantized at a time, as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

from .measured import decibels, lowest
from .plain import plain
from .words import ROOT, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a model, quantized by itself.

    Args:
        name: its output node; for a family its root, for a module its path.
        kind: "block", "op", "join", "family" or "module".
        title: the ops in it ("conv2d + relu"), or what was decided for a family.
        module: path of the module that it comes from, "" for the root and for families.
        nodes: the nodes in it.
        outputs_db: SQNR in dB at each float output of the model, with this part quantized and all else float.
    """

    name: str
    kind: str
    title: str
    module: str
    nodes: tuple[str, ...]
    outputs_db: tuple[float, ...]

    @property
    def worst_db(self) -> float:
        """The lowest SQNR of an output that could be measured; NaN if none could."""
        return lowest(self.outputs_db)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How much each part of a model costs by itself, the worst first.

    Args:
        backend: name of the config, "" for none.
        by: what a part is: "block", "family" or "module".
        batches: how many were run; all are taken together.
        outputs: the nodes that write the model's float outputs.
        together_db: SQNR in dB at each of them with everything quantized.
        parts: the parts that quantize anything, by their worst output.
    """

    backend: str
    by: str
    batches: int
    outputs: tuple[str, ...]
    together_db: tuple[float, ...]
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """Return the part of a name.

        Raises:
            KeyError: if there is none.
        """
        return {each.name: each for each in self.parts}[name]

    def to_json(self) -> str:
        """Return all of it as JSON text; numbers that JSON lacks (inf, nan) are written as strings."""
        return json.dumps(plain({"schema": SCHEMA, **asdict(self)}), indent=2, allow_nan=False)

    def __str__(self) -> str:
        """Return all of it as aligned plain text."""
        rows = [self._headings(), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join([self._title(), *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield a table for a terminal."""
        table = Table(box=box.SIMPLE_HEAD, title=self._title(), title_justify="left", title_style="bold")
        for column, heading in enumerate(self._headings()):
            table.add_column(heading, overflow="fold", justify="right" if column >= _TEXTS else "left")
        for row in self._rows():
            table.add_row(*map(Text, row))
        yield table

    def _title(self) -> str:
        return f"{self.backend}: SQNR in dB with one {self.by} quantized at a time, {counted(self.batches, 'batches')}"

    def _headings(self) -> tuple[str, ...]:
        return (self.by, "what", "module", *self.outputs)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield "all together", "", "", *map(decibels, self.together_db)
        for part in self.parts:
            yield part.name or ROOT, part.title, part.module, *map(decibels, part.outputs_db)


_TEXTS: Final = 3  # columns before those of the outputs
