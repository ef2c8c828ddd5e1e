"""Which quantize ops a backend's pass would hoist above one tensor, if all of them were there.

The pass starts at any value that is no op that it looks through, and walks down through those ops. It fires where
every path ends in a quantize and, where ops that read a part are all that lies between, these together read at least
`min_coverage` of the tensor. So the items of a split are starting points of their own, where the pass can't look
through the split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from ..configs.ops import HEADS
from ..observers.plan import Hoist
from ..observers.rules import HoistRule
from .graph import argument, numel, op_name, users, value_of, where
from .roles import MOVEMENTS, Role, Roles, moved

if TYPE_CHECKING:
    from ..configs.base import BackendConfig
    from .branches import Tree, Trees
    from .draft import Draft


@dataclass
class _Region:
    """What the pass meets below one value."""

    start: Node
    costs: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    read: int = 0
    blocked: bool = False


def relate_hoists(draft: Draft, trees: Trees, roles: Roles) -> None:
    """Record which cells the backend's pass would hoist together (after all reads)."""
    for tree in trees.by_root.values():
        config = roles.configs[next(value for segment in tree.segments for value in segment.values)]
        rules = config.branches
        if rules.hoist is HoistRule.NEVER or tree.top.cell in draft.foreign:
            continue
        for region in _regions(draft, tree, roles, config):
            covered = region.names - rules.covering or region.read >= rules.min_coverage * numel(region.start)
            if covered and not region.blocked and len(region.costs) > 1:
                draft.hoists.append(Hoist(where=where(region.start), costs=region.costs, rules=rules))


def _regions(draft: Draft, tree: Tree, roles: Roles, config: BackendConfig) -> list[_Region]:
    through = config.branches.hoist_through
    found = {tree.root: _Region(tree.root)}
    region_of = {tree.root: found[tree.root]}
    for value in tree.values():
        source = moved(value)
        above = region_of[source if source is not None else tree.root]
        name = _mover(value)
        if name in through:
            region_of[value] = above
            above.names.add(name)
            above.read += numel(value)
        else:
            above.blocked = True
            region_of[value] = found[value] = _Region(value)
    for value, region in region_of.items():
        _meet(draft, tree, value, region, roles)
    return list(found.values())


def _mover(value: Node) -> str:
    """Return the name of the op that moves, for an item of a tuple that of the op that made the tuple."""
    source = value.args[0]
    return op_name(source) if op_name(value) == "getitem" and isinstance(source, Node) else op_name(value)


def _meet(draft: Draft, tree: Tree, value: Node, region: _Region, roles: Roles) -> None:
    """Note what reads a value: a quantize for another cell, or what stops the pass."""
    own = draft.places.get(value)
    if own is not None and own != tree.top.cell and value is not region.start:
        region.costs.setdefault(own, 0)  # a movement that is quantized itself
        stops = False
    else:
        stops = True
    for user in users(value):
        if roles.role(user) in MOVEMENTS or isinstance(value_of(user), (tuple, list)):
            continue
        cell = draft.places.get((value, user))
        if cell is not None and cell not in draft.foreign:
            region.costs[cell] = region.costs.get(cell, 0) + _cost_below(draft, user, roles)
        elif stops:
            region.blocked = True


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
