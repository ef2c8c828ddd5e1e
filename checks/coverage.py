"""What is quantized at all: float islands between quantized ops, and graphs in which nothing is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..annotators.graph import is_float_tensor, op_name, users
from ..configs.ops import JOINS, MOVEMENT, NO_OPS, POOLS, SELECTS
from .findings import Finding, Severity
from .kinds import Kind
from .qdq import Facts, finding, is_dequantize, is_quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.fx import Node

_PASSING = MOVEMENT | NO_OPS | SELECTS | POOLS | JOINS | {"getitem"}
SHOWN = 6  # names of an island's ops that a message lists


def find(facts: Facts) -> Iterator[Finding]:
    """Yield the float islands, or that nothing is quantized."""
    if _is_quantized(facts.nodes):
        yield from _islands(facts)
        return
    nested = list(facts.program.nested())
    if facts.program.is_nested or any(_is_quantized(each.model.graph.nodes) for each in nested):
        return
    last = facts.nodes[-1]
    if any("call_delegate" in str(node.target) for node in facts.nodes):
        yield finding(
            "QM602",
            Severity.ERROR,
            last,
            "the graph is delegated already, and what is in a delegate can't be seen",
            "check the converted graph or the edge program before lowering",
        )
        return
    inside = sum(bool(op_name(node)) for each in nested for node in each.model.graph.nodes)
    yield finding(
        "QM601",
        Severity.ERROR,
        last,
        "nothing is quantized: the graph holds no quantize or dequantize"
        + (f"; {inside} ops are in nested graphs, where a quantizer may not look" if inside else ""),
        "see what the quantizer annotated; check that convert_pt2e was called, and that its filters match the model",
    )


def _is_quantized(nodes: Iterable[Node]) -> bool:
    return any(is_dequantize(node) or is_quantize(node) for node in nodes)


def _islands(facts: Facts) -> Iterator[Finding]:
    """Find connected float ops on the way from dequantize to quantize ops.

    An op (with the clamp that is folded into it) between a dequantize and a quantize is what a quantized op looks
    like; two or more in a row, and one that the config does not run quantized, are float inside.
    """
    head_of = {member: block.head for block in facts.blocks for member in block.members}
    below = _reached(
        facts.nodes, is_dequantize, lambda node: [n for n in node.all_input_nodes if not facts.is_constant(n)]
    )
    above = _reached(facts.nodes[::-1], is_quantize, users)
    inside = [n for n in facts.nodes if n in below and n in above and not _passes(n)]
    units: dict[Node, list[Node]] = {head_of.get(node, node): [] for node in inside}
    for node in inside:
        units[head_of.get(node, node)].append(node)
    alone: dict[str, list[Node]] = {}
    for island in _connected(units, head_of):
        if len(island) > 1:
            yield _float(island, f"{len(island)} ops run in float between quantized ones")
        elif facts.given and not facts.runs_quantized(island[0]):
            alone.setdefault(op_name(island[0]), []).append(island[0])
    for name, nodes in alone.items():
        yield _float(nodes, f"{facts.config.name} runs {name} in float, between quantized ops")


def _float(nodes: list[Node], what: str) -> Finding:
    shown = ", ".join(node.name for node in nodes[:SHOWN]) + (", ..." if len(nodes) > SHOWN else "")
    return finding(
        "QM603",
        Severity.INFO,
        nodes[0],
        f"{what}: {shown}",
        "annotate what the backend runs quantized, or accept float kernels there",
        {"ops": float(len(nodes))},
    )


def _reached(
    nodes: Iterable[Node], borders: Callable[[Node], bool], neighbours: Callable[[Node], Iterable[Node]]
) -> set[Node]:
    """Return the float ops that the values at a border get to; `nodes` are in the order of that way."""
    found: set[Node] = set()
    for node in nodes:
        if _is_float_op(node) and any(borders(n) or n in found for n in neighbours(node)):
            found.add(node)
    return found


def _is_float_op(node: Node) -> bool:
    if node.op != "call_function" or is_quantize(node) or is_dequantize(node):
        return False
    return _passes(node) or is_float_tensor(node)


def _passes(node: Node) -> bool:
    """Tell whether the op merely passes values on, so that it makes no island by itself."""
    return op_name(node) in _PASSING


def _connected(units: Mapping[Node, list[Node]], head_of: Mapping[Node, Node]) -> Iterator[list[Node]]:
    """Yield the units (an op, or the head of a block) that hang together without a quantize in between."""
    seen: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while seen[node] is not node:
            seen[node] = seen[seen[node]]
            node = seen[node]
        return node

    seen.update({unit: unit for unit in units})
    for unit, members in units.items():
        for member in members:
            for reader in _float_readers(member):
                if (other := head_of.get(reader, reader)) in units:
                    seen[top(other)] = top(unit)
    groups: dict[Node, list[Node]] = {}
    for unit in units:
        groups.setdefault(top(unit), []).append(unit)
    yield from groups.values()


def _float_readers(node: Node) -> Iterator[Node]:
    """Yield the ops that read a value in float, seeing through ops that merely pass it on."""
    pending, seen = list(users(node)), set()
    while pending:
        reader = pending.pop()
        if reader in seen:
            continue
        seen.add(reader)
        if _passes(reader):
            pending += users(reader)
        elif not is_quantize(reader):
            yield reader


KIND = Kind(
    "coverage",
    {
        "QM601": "nothing is quantized",
        "QM602": "the graph is delegated already",
        "QM603": "ops run in float between quantized ones",
    },
    find,
)
