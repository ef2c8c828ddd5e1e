"""What `explain` returns: plain data on what became of each op, block and tensor, and why. No graph is held."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from . import terminal
from .plain import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

    from ..observers.rules import Decision
    from .measured import Measurement

SCHEMA: Final = 1


class Status(Enum):
    """What became of an op."""

    BLOCK = "block"
    """The output of a fused block (of one op, or of several)."""
    FUSED = "fused"
    """Inside a fused block: nothing is quantized before or after it."""
    QUANTIZED = "quantized"
    """Its inputs are quantized, and its output has qparams of its own."""
    MOVED = "moved"
    """It moves values; qparams pass through."""
    JOINED = "joined"
    """Several tensors become one."""
    FLOAT = "float"
    """It computes on floats, and writes floats."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The qparams of one tensor.

    Args:
        dtype: of the codes ("int8").
        quant_min: the smallest code.
        quant_max: the largest code.
        scale: real units per code; of several channels, the largest.
        zero_point: the code of 0; None where channels differ in it.
        channels: how many scales there are; 1 for one per tensor.
    """

    dtype: str
    quant_min: int
    quant_max: int
    scale: float
    zero_point: int | None
    channels: int = 1

    def __str__(self) -> str:
        """Return the numbers in a few words."""
        if self.channels > 1:
            return f"{self.dtype} x{self.channels} scales"
        return f"{self.dtype} {self.scale:.4g} zp {self.zero_point}"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One input of an op.

    Args:
        value: the node that it reads.
        group: the qparam group of the edge, or "" where it is read in float.
        kind: "activation", "weight" or "bias".
        requantized: the value has other qparams than the edge, and is rescaled on the way.
    """

    value: str
    group: str
    kind: str = "activation"
    requantized: bool = False


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the graph.

    Args:
        node: its name.
        op: what it calls.
        module: path of the module that it comes from, "" for the root.
        status: what became of it.
        block: the output node of its block, or "".
        inputs: what it reads, where that is or could have been quantized.
        output: the qparam group of its output, or "" where that is float or inside a block.
        reads: the ops and graph inputs whose float tensors it depends on.
        why: what is worth saying: why it is float, why an input is requantized, why an activation is not fused.
    """

    node: str
    op: str
    module: str
    status: Status
    block: str = ""
    inputs: tuple[Edge, ...] = ()
    output: str = ""
    reads: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FusedBlock:
    """One fused block.

    Args:
        output: its output node.
        module: path of the module of its head.
        members: (node, op) from head to output.
        lower: what its activation bounds the output to from below, or None.
        upper: the same from above.
        group: the qparam group of its output, or "" where that is float.
        holds: saturation at the first and last code is that clamp; None where the output is float or not yet observed.
        unfused: why an activation that follows was not taken in, or "".
    """

    output: str
    module: str
    members: tuple[tuple[str, str], ...]
    lower: float | None
    upper: float | None
    group: str
    holds: bool | None
    unfused: str = ""

    @property
    def title(self) -> str:
        """The ops of the block, as in "conv2d + relu"."""
        return " + ".join(op for _, op in self.members)

    @property
    def contract(self) -> str:
        """What the output's saturation must stand for, in words, or "" for nothing."""
        if self.lower is None and self.upper is None:
            return ""
        low = "-inf" if self.lower is None else f"{self.lower:g}"
        return f"[{low}, {'inf' if self.upper is None else f'{self.upper:g}'}]"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors with bit-identical qparams.

    Args:
        name: of the group: one of its cells.
        cells: the cells in it.
        values: the nodes whose values it holds.
        kind: "activation", "weight" or "bias".
        numbers: the qparams, or None where nothing was observed yet.
        range: [min, max] of all of its values as observed, or None.
    """

    name: str
    cells: tuple[str, ...]
    values: tuple[str, ...]
    kind: str
    numbers: Numbers | None
    range: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a quantizer did to a graph, and why.

    Args:
        backend: name of the global config, "" for none.
        ops: in graph order.
        blocks: the fused blocks.
        groups: the qparam groups, by name.
        decisions: what was decided on branch families, joins and single tensors.
        messages: what the quantizer warned of.
        observed: how many of the activations' cells have ranges, of how many.
        outputs: the ops and graph inputs behind the graph's outputs.
        measured: SQNR of the quantized graph, where it was measured (`measure_sqnr`).
    """

    backend: str
    ops: tuple[Op, ...]
    blocks: tuple[FusedBlock, ...]
    groups: dict[str, Group]
    decisions: tuple[Decision, ...]
    messages: tuple[str, ...]
    observed: tuple[int, int]
    outputs: tuple[str, ...] = ()
    measured: Measurement | None = None

    def modules(self) -> dict[str, list[Op]]:
        """Return the ops by module path, in the order in which the modules are first met."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            found.setdefault(op.module, []).append(op)
        return found

    def op(self, node: str) -> Op:
        """Return what became of a node.

        Raises:
            KeyError: if no op has that name.
        """
        return {each.node: each for each in self.ops}[node]

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind of thing."""
        status = Counter(op.status for op in self.ops)
        return {
            "blocks": len(self.blocks),
            "activations fused": sum(bool(block.contract) for block in self.blocks),
            "ops fused": status[Status.FUSED],
            "ops quantized": status[Status.QUANTIZED],
            "ops moved": status[Status.MOVED],
            "joins": status[Status.JOINED],
            "ops float": status[Status.FLOAT],
            "edges requantized": sum(edge.requantized for op in self.ops for edge in op.inputs),
            "groups of several tensors": sum(len(group.cells) > 1 for group in self.groups.values()),
            "decisions to look at": sum(decision.finding for decision in self.decisions),
        }

    def to_json(self) -> str:
        """Return all of it as JSON text; numbers that JSON lacks (inf, nan) are written as strings."""
        content: dict[str, Any] = {
            "schema": SCHEMA,
            "backend": self.backend,
            "observed": list(self.observed),
            "counts": self.counts(),
            "ops": [asdict(op) for op in self.ops],
            "blocks": [asdict(block) for block in self.blocks],
            "groups": [asdict(group) for group in self.groups.values()],
            "decisions": [asdict(decision) for decision in self.decisions],
            "messages": self.messages,
            "outputs": self.outputs,
            "measured": self.measured.content() if self.measured is not None else None,
        }
        return json.dumps(plain(content), indent=2, allow_nan=False)

    def __str__(self) -> str:
        """Return all of it as plain text, one op a line."""
        return terminal.plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield tables for a terminal."""
        yield from terminal.tables(self)
