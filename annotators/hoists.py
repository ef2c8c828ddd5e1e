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

from ..configs.ops import HEADS
from ..observers.plan import Hoist
from ..observers.rules import HoistRule
from .graph import argument, is_float_tensor, numel, op_name, users, value_of, where
from .roles import Role, Roles, moved

if TYPE_CHECKING:
    from .draft import Draft

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
    for region in _regions(draft, through):
        if region.blocked or len(region.readers) <= 1:
            continue
        found = draft.cells[next(iter(region.readers))].config.branches
        covered = region.names - found.covering or region.read >= found.min_coverage * numel(region.start)
        if covered and found.hoist is not HoistRule.NEVER:
            costs = {
                c: sum(_cost_below(draft, each, roles) for each in readers) for c, readers in region.readers.items()
            }
            draft.hoists.append(Hoist(where=where(region.start), costs=costs, rules=found))


def _regions(draft: Draft, through: frozenset[str]) -> list[_Region]:
    """Return the regions of all float values, going through the graph once."""
    region_of: dict[Node, _Region] = {}
    above = _above_forks(draft, through)
    for value in draft.model.graph.nodes if above else ():
        source = _looked_through(value, through)
        if not (value in above or source in region_of) or not is_float_tensor(value):
            continue
        if source not in region_of or _is_quantized(draft, value):
            region_of[value] = _Region(value)
            continue
        region = region_of[value] = region_of[source]
        if op_name(value) not in _CASTS:
            region.names.add(_mover(value))
            region.read += numel(value)
    for value, region in region_of.items():
        _meet(draft, value, region, through)
    regions = {id(region): region for region in region_of.values()}
    return list(regions.values())


def _moves(value: Node, through: frozenset[str]) -> bool:
    """Tell whether the pass looks through the op."""
    return value.op == "call_function" and ((name := _mover(value)) in through or name in _CASTS)


def _above_forks(draft: Draft, through: frozenset[str]) -> set[Node]:
    """Return the values below which the pass may meet more than one reader: those read twice, and what they are of."""
    found: set[Node] = set()
    for node in draft.model.graph.nodes:
        value: Node | None = node if len(node.users) > 1 else None
        while value is not None and value not in found:
            found.add(value)
            value = moved(value) if _moves(value, through) else None
    return found


def _looked_through(value: Node, through: frozenset[str]) -> Node | None:
    """Return the tensor that a value was moved from by an op that the pass looks through, or None."""
    source = moved(value) if _moves(value, through) else None
    if source is None or _mover(value) in through:
        return source
    same = getattr(value_of(source), "dtype", None) == getattr(value_of(value), "dtype", None)
    return source if op_name(value) in _CASTS and same else None


def _mover(value: Node) -> str:
    """Return the name of the op that moves, for an item of a tuple that of the op that made the tuple."""
    name = op_name(value)
    return op_name(value.args[0]) if name == "getitem" and isinstance(value.args[0], Node) else name


def _is_quantized(draft: Draft, value: Node) -> bool:
    """Tell whether a movement is quantized itself, at its input or output."""
    reader = value.args[0] if value.target is operator.getitem else value
    return value in draft.places or (moved(value), reader) in draft.places


def _meet(draft: Draft, value: Node, region: _Region, through: frozenset[str]) -> None:
    """Note what reads a value: a quantize, with its cell, or what stops the pass."""
    for user in users(value):
        if op_name(user) in _LIKE and moved(user) is not value:
            continue
        cell = draft.places.get((value, user))
        if cell is None and _is_movement_of(value, user, through):
            cell = draft.places.get(user)
            if cell is None:
                continue
        if cell is not None and cell not in draft.foreign:
            region.readers.setdefault(cell, []).append(user)
        else:
            region.blocked = True


def _is_movement_of(value: Node, user: Node, through: frozenset[str]) -> bool:
    if isinstance(value_of(user), (tuple, list)):
        return moved(user) is value and op_name(user) in through
    return is_float_tensor(user) and _looked_through(user, through) is value


def _cost_below(draft: Draft, reader: Node, roles: Roles) -> int:
    """Return the cost of a reader in float; a join in float makes its own readers float too."""
    if roles.role(reader) is not Role.JOIN:
        return cost(reader)
    output = draft.places[reader]
    return numel(reader) + sum(cost(user) for user in users(reader) if draft.places.get((reader, user)) == output)


def cost(reader: Node) -> int:
    """Return the multiply-accumulates of an op, or its output's elements where it has no weight."""
    rule = HEADS.get(op_name(reader))
    weight = argument(reader, rule.weight) if rule else None
    if rule is None or not isinstance(weight, Node):
        return numel(reader)
    shape = getattr(value_of(weight), "shape", ())
    channels = int(shape[rule.channel_axis]) if len(shape) > rule.channel_axis else 1
    return numel(reader) * max(1, numel(weight) // max(1, channels))
