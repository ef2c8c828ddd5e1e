"""Branch families: the tree of data movement below one tensor, cut into cells.

    root ---- view ---- slice ---- permute ---> conv      segment "slice": a leaf cell
      |         |
      |         +------ slice ---- slice -----> linear    inner slice: a leaf; outer slice: in transit, root's cell
      |
      +-------------------------------------->  add       a direct edge: a leaf cell of edges alone

Values on the way to a leaf (in transit) are parts of the root and belong to its cell; a quantized op that reads one
of them directly reads through a cell of its own, so that the root can stay float without leaving the op without
a quantized input. One pass over the graph; the work per node does not depend on how wide a root fans out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..configs.ops import HEADS
from ..observers.plan import Family, Leaf
from ..observers.qparams import INT16_SYMMETRIC
from ..observers.rules import Outcome
from .graph import argument, numel, op_name, users, where
from .roles import MOVEMENTS, Role, Roles, moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from ..configs.base import BackendConfig
    from .draft import Draft


@dataclass
class Segment:
    """Movement nodes in a row, from a select (or the root) down to the next select."""

    tree: Tree
    values: list[Node] = field(default_factory=list)
    children: list[Segment] = field(default_factory=list)
    cell: str | None = None
    direct: str | None = None
    readers: list[Node] = field(default_factory=list)

    @property
    def in_transit(self) -> bool:
        """Tell whether further branches begin below."""
        return bool(self.children)


@dataclass
class Tree:
    """All movement below one root tensor."""

    root: Node
    top: Segment = field(init=False)
    segments: list[Segment] = field(init=False)

    def __post_init__(self) -> None:
        self.top = Segment(self)
        self.segments = [self.top]

    @property
    def branches(self) -> bool:
        """Tell whether a select is in it, so that there is something to decide."""
        return len(self.segments) > 1


@dataclass
class Trees:
    """The trees of a graph, and the segment of each movement node."""

    by_root: dict[Node, Tree] = field(default_factory=dict)
    segment_of: dict[Node, Segment] = field(default_factory=dict)

    def segment(self, value: Node) -> Segment | None:
        """Return the segment that the value lies in (a root lies in its tree's top), or None."""
        found = self.segment_of.get(value)
        if found is None and value in self.by_root:
            found = self.by_root[value].top
        return found


def find_trees(roles: Roles) -> Trees:
    """Return the movement trees, going through the nodes with roles once (they are in graph order)."""
    trees = Trees()
    for node in roles.of:
        if roles.role(node) not in MOVEMENTS or (source := moved(node)) is None:
            continue
        parent = trees.segment_of.get(source)
        if parent is None:
            parent = trees.by_root.setdefault(source, Tree(source)).top
        segment = parent
        if roles.role(node) is Role.SELECT:
            segment = Segment(parent.tree)
            parent.children.append(segment)
            parent.tree.segments.append(segment)
        segment.values.append(node)
        trees.segment_of[node] = segment
    return trees


def annotate_tree(draft: Draft, tree: Tree, roles: Roles) -> None:
    """Give every segment of a tree its cell, and put the movement's places in them."""
    first = tree.top.values[0] if tree.top.values else tree.segments[1].values[0]
    config = roles.configs[first]
    root_cell = draft.output_cell(tree.root)
    if root_cell is None and config.ops.quantize_movement:
        root_cell = draft.float_cell(tree.root, config)
    tree.top.cell = root_cell
    for segment in tree.segments:
        if segment is tree.top or segment.in_transit or root_cell in draft.foreign:
            segment.cell = root_cell
        else:
            value = segment.values[0]
            segment.cell = draft.branch_cell(value, roles.configs[value], root_cell)
        for value in segment.values if config.ops.quantize_movement else ():
            _put_movement(draft, value, segment, tree, roles)


def _put_movement(draft: Draft, value: Node, segment: Segment, tree: Tree, roles: Roles) -> None:
    source = moved(value)
    if source is None or segment.cell is None:
        return
    # A select reads its parent's cell; any other movement reads the cell that it also writes.
    above = tree.top.cell if roles.role(value) is Role.SELECT else segment.cell
    parent = value.args[0]
    reader = value if parent is source else parent  # through a tuple: the edge ends at the split
    if above is not None:
        draft.put((source, reader), above)  # type: ignore[arg-type]
    draft.put(value, segment.cell)


def read_branch(draft: Draft, segment: Segment, value: Node, reader: Node, config: BackendConfig) -> str:
    """Put the edge from a value of a tree to a quantized op in its cell, and return the cell."""
    segment.readers.append(reader)
    scheme = config.activation.scheme
    cell = segment.cell
    if segment.in_transit and cell not in draft.foreign:
        if segment.direct is None:
            name = f"{value.name}->{reader.name}"
            segment.direct = draft.branch_cell(value, config, segment.tree.top.cell, name=name)
        cell = segment.direct
    elif cell is None:
        cell = segment.cell = draft.float_cell(value, config)
    if draft.base_scheme(cell) != scheme:
        cell = draft.float_cell(value, config)
    draft.put((value, reader), cell)
    return cell


def annotate_families(draft: Draft, trees: Trees, roles: Roles) -> None:
    """Record what may be decided for every tree that branches."""
    for tree in trees.by_root.values():
        if not tree.branches or tree.top.cell in draft.foreign:
            continue
        leaves = list(_leaves(draft, tree))
        config = roles.configs[tree.segments[1].values[0]]
        root_is_float = draft.output_cell(tree.root) is None
        if root_is_float and any(not leaf.read_in_float for leaf in leaves):
            draft.drop_cells({leaf.cell for leaf in leaves if leaf.read_in_float})
            leaves = [leaf for leaf in leaves if not leaf.read_in_float]
        if leaves:
            wide = INT16_SYMMETRIC if Outcome.WIDE_ROOT in config.branches.outcomes else None
            draft.families.append(
                Family(
                    where=where(tree.root),
                    root=tree.top.cell if tree.top.cell in draft.cells else None,
                    root_is_float=root_is_float,
                    leaves=tuple(leaves),
                    hoistable=_hoistable(tree, roles, config),
                    wide=wide,
                    rules=config.branches,
                )
            )


def _leaves(draft: Draft, tree: Tree) -> Iterator[Leaf]:
    for segment in tree.segments:
        cell = segment.direct if segment.in_transit else segment.cell if segment is not tree.top else None
        if cell is None or not draft.cells[cell].values:
            continue
        cost = sum(_cost(reader) for reader in segment.readers)
        yield Leaf(cell=cell, consumer_cost=cost, read_in_float=not segment.readers)


def _cost(reader: Node) -> int:
    """Return the multiply-accumulates of an op, or its output's elements where it has no weight."""
    rule = HEADS.get(op_name(reader))
    weight = argument(reader, rule.weight) if rule else None
    if rule is None or not hasattr(weight, "meta"):
        return numel(reader)
    value = weight.meta.get("val")  # type: ignore[union-attr]
    channels = int(value.shape[rule.channel_axis]) if value is not None and value.dim() > rule.channel_axis else 1
    return numel(reader) * max(1, numel(weight) // max(1, channels))  # type: ignore[arg-type]


def _hoistable(tree: Tree, roles: Roles, config: BackendConfig) -> bool:
    """Tell whether a pass that hoists below this root would fire if every leaf were quantized.

    It needs every path from the root to go through ops that it knows and to end in a quantize, and (where ops that
    read a part are all that lies between) the parts together to be at least `min_coverage` of the root.
    """
    rules = config.branches
    moves = [value for segment in tree.segments for value in segment.values]
    names = {op_name(value.args[0] if op_name(value) == "getitem" else value) for value in moves}  # type: ignore[arg-type]
    if not names <= rules.hoist_through:
        return False
    for value in [tree.root, *moves]:
        for user in users(value):
            if user.op == "output" or (roles.role(user) is Role.FLOAT and op_name(user) != "getitem"):
                return False
    read = sum(numel(value) for value in moves)
    return not names <= rules.covering or read >= rules.min_coverage * numel(tree.root)
