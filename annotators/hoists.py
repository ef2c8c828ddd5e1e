"""Which quantize ops a backend's pass would hoist above one tensor, if all of them were there.

The pass starts at any value that is no op that it looks through, and walks down through those ops. It fires where
every path ends in a quantize and, where ops that read a part are all that lies between, these together read at least
`min_coverage` of the tensor. So the items of a split are starting points of their own, where the pass can't look
through the split.

The walk goes by the names of ops alone, not by what they are to the annotators: the pass also looks through a
movement that a rule of the user's keeps out of quantization, and never sees a cast that changes nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torch.fx import Node

from ..observers.plan import Hoist
from ..observers.rules import HoistRule
from .graph import numel, op_name, users, value_of, where
from .roles import Role, Roles, moved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .draft import Draft
    from .facts import FloatTensors

# Lowering removes them where they change nothing.
_CASTS: Final = frozenset({"to", "_to", "type_as", "positive", "lift_fresh"})
# Of their second operand only shape or dtype is asked.
_LIKE: Final = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


@dataclass
class _Region:
    """What the pass meets below one value."""

    start: Node
    readers: dict[str, list[Node]] = field(default_factory=dict)  # by the cell through which they read
    names: set[str] = field(default_factory=set)
    read: int = 0
    blocked: bool = False


def relate_hoists(draft: Draft, roles: Roles) -> None:
    """Record which cells the backend's pass would hoist together (after all reads)."""
    rules = {id(sketch.config): sketch.config.branches for sketch in draft.cells.values()}
    hoisting = [each for each in rules.values() if each.hoist is not HoistRule.NEVER]
    through = frozenset().union(*(each.hoist_through for each in hoisting))
    if not through:
        return
    for region in _regions(draft, roles.floats, _Movers(draft.model.graph.nodes, through)):
        if region.blocked or len(region.readers) <= 1:
            continue
        found = draft.cells[next(iter(region.readers))].config.branches
        covered = region.names - found.covering or region.read >= found.min_coverage * numel(region.start)
        if covered and found.hoist is not HoistRule.NEVER:
            costs = {
                c: sum(_cost_below(draft, each, roles) for each in readers) for c, readers in region.readers.items()
            }
            draft.hoists.append(Hoist(where=where(region.start), costs=costs, rules=found))


class _Movers:
    """The ops that the pass looks through: for each, the tensor that it moves.

    Args:
        nodes: those of a graph, in its order.
        through: names of ops that it looks through.
    """

    def __init__(self, nodes: Iterable[Node], through: frozenset[str]) -> None:
        self.through = through
        self.source_of: dict[Node, Node] = {}
        self.above_forks: set[Node] = set()
        moves = {}  # casts that change the dtype among them
        movers = through | _CASTS
        for node in nodes:
            name = op_name(node)
            name = _mover(node) if name == "getitem" else name
            if name in movers and (source := moved(node)) is not None:
                moves[node] = source
                if name in through or _dtype(node) == _dtype(source):
                    self.source_of[node] = source
            above: Node | None = node if len(node.users) > 1 else None
            while above is not None and above not in self.above_forks:
                self.above_forks.add(above)
                above = moves.get(above)


def _regions(draft: Draft, floats: FloatTensors, movers: _Movers) -> list[_Region]:
    """Return the regions of all float values below which more than one op may read, going through the graph once."""
    region_of: dict[Node, _Region] = {}
    starts, source_of = movers.above_forks, movers.source_of
    for value in draft.model.graph.nodes if starts else ():
        source = source_of.get(value)
        above = region_of.get(source) if source is not None else None
        if (above is None and value not in starts) or not floats[value]:
            continue
        if above is not None and not _is_quantized(draft, value):
            region_of[value] = above
            if op_name(value) not in _CASTS:
                above.names.add(_mover(value))
                above.read += numel(value)
        elif value in starts:
            region_of[value] = _Region(value)
    for value, region in region_of.items():
        _meet(draft, floats, value, region, movers)
    regions = {id(region): region for region in region_of.values()}
    return list(regions.values())


def _dtype(value: Node) -> object:
    return getattr(value_of(value), "dtype", None)


def _mover(value: Node) -> str:
    """Return the name of the op that moves, for an item of a tuple that of the op that made the tuple."""
    name = op_name(value)
    return op_name(value.args[0]) if name == "getitem" and isinstance(value.args[0], Node) else name


def _is_quantized(draft: Draft, value: Node) -> bool:
    """Tell whether a movement is quantized itself, at its input or output."""
    reader = value.args[0] if value.target is operator.getitem else value
    return value in draft.outputs or (isinstance(reader, Node) and moved(value) in draft.reads.get(reader, ()))


def _meet(draft: Draft, floats: FloatTensors, value: Node, region: _Region, movers: _Movers) -> None:
    """Note what reads a value: a quantize, with its cell, or what stops the pass."""
    for user in users(value):
        cell = draft.edge(value, user)
        if cell is None:
            if op_name(user) in _LIKE and moved(user) is not value:
                continue
            if _is_movement_of(value, user, floats, movers):
                cell = draft.outputs.get(user)
                if cell is None:
                    continue
        if cell is not None and cell not in draft.foreign:
            region.readers.setdefault(cell, []).append(user)
        else:
            region.blocked = True


def _is_movement_of(value: Node, user: Node, floats: FloatTensors, movers: _Movers) -> bool:
    if isinstance(value_of(user), (tuple, list)):
        return moved(user) is value and op_name(user) in movers.through
    return floats[user] and movers.source_of.get(user) is value


def _cost_below(draft: Draft, reader: Node, roles: Roles) -> int:
    """Return the cost of a reader in float; a join in float makes its own readers float too."""
    if roles.role(reader) is not Role.JOIN:
        return roles.costs[reader]
    output = draft.outputs[reader]
    return numel(reader) + sum(roles.costs[user] for user in users(reader) if draft.edge(reader, user) == output)
