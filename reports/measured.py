"""What was measured of a quantized graph beside the float one: SQNR in dB, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from .plain import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

    from .explanation import Numbers

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class TensorSqnr:
    """One tensor as its readers get it.

    Args:
        node: the node that writes it, under the same name in both graphs.
        op: what that calls.
        module: path of the module that it comes from, "" for the root.
        numbers: the qparams that it is read through; None where it is read in float.
        sqnr_db: float graph's tensor against the quantized graph's, all noise from above included.
        rounding_db: the float graph's tensor against itself, rounded to these qparams: what this one quantization
            would cost alone. inf where it is read in float, NaN where the qparams are no single numbers.
    """

    node: str
    op: str
    module: str
    numbers: Numbers | None
    sqnr_db: float
    rounding_db: float


@dataclass(frozen=True, kw_only=True)
class OutputSqnr:
    """One output of the model.

    Args:
        index: its place among the model's outputs, nested ones counted in order.
        node: the node that writes it, in the float graph.
        sqnr_db: float graph against quantized graph.
    """

    index: int
    node: str
    sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """SQNR of a quantized graph, all batches taken together: 10 log10(sum of squares / sum of squared errors).

    Args:
        batches: how many were run.
        outputs: the model's float outputs.
        tensors: the float tensors that both graphs have, in graph order; one read through several qparams comes
            several times.
        losses_db: for each decision, in order: cell -> by how much its rounding noise grows by what was decided (it
            shares qparams, passes a wide root, is requantized for a join), measured on the float graph's values.
            Stands beside `Decision.losses_db`, which is predicted. None for the graphs of other quantizers.
        unmatched: nodes of the quantized graph, other than quantize and dequantize, that the float one lacks.
    """

    batches: int
    outputs: tuple[OutputSqnr, ...]
    tensors: tuple[TensorSqnr, ...]
    losses_db: tuple[dict[str, float], ...]
    unmatched: tuple[str, ...] = ()

    @property
    def worst_db(self) -> float:
        """The lowest SQNR of an output; NaN if there is none, or none that is finite throughout."""
        return lowest(output.sqnr_db for output in self.outputs)

    def readings(self, node: str) -> tuple[TensorSqnr, ...]:
        """Return a node's tensor as its readers get it: through each of its qparams, and in float."""
        return self._by_node.get(node, ())

    @cached_property
    def _by_node(self) -> dict[str, tuple[TensorSqnr, ...]]:
        found: dict[str, tuple[TensorSqnr, ...]] = {}
        for tensor in self.tensors:
            found[tensor.node] = (*found.get(tensor.node, ()), tensor)
        return found

    def of(self, node: str) -> float:
        """Return the SQNR of a node's tensor in dB, the lowest of its readings; NaN where it was not measured."""
        return lowest(tensor.sqnr_db for tensor in self.readings(node))

    def content(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        found: dict[str, Any] = plain({"worst_db": self.worst_db, **asdict(self)})
        return found

    def to_json(self) -> str:
        """Return all of it as JSON text; numbers that JSON lacks (inf, nan) are written as strings."""
        return json.dumps({"schema": SCHEMA, **self.content()}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        """Return outputs and tensors as aligned plain text."""
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield a table for a terminal."""
        table = Table(box=box.SIMPLE_HEAD)
        for heading in _HEADINGS:
            table.add_column(heading, overflow="fold", justify="right" if "dB" in heading else "left")
        for row in self._rows():
            table.add_row(*map(Text, row))
        yield table

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for output in self.outputs:
            yield output.node, f"output {output.index}", "", "", decibels(output.sqnr_db), ""
        for each in self.tensors:
            encoding = str(each.numbers) if each.numbers else "float"
            yield each.node, each.op, each.module, encoding, decibels(each.sqnr_db), decibels(each.rounding_db)


_HEADINGS: Final = ("node", "op", "module", "read as", "SQNR dB", "rounding alone dB")


def lowest(values: Iterable[float]) -> float:
    """Return the lowest of the numbers that are numbers; NaN if there are none."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def decibels(value: float) -> str:
    """Return a number of dB as tables show it: one decimal, "exact" without any noise, "" where not measured."""
    if math.isnan(value):
        return ""
    return "exact" if value == math.inf else f"{value:.1f}"
