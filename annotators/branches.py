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

from ..observers.plan import Family, Leaf
from ..observers.qparams import INT16_SYMMETRIC
from ..observers.rules import JoinOutcome, Outcome
from .blocks import why_not_fused
from .draft import alike
from .graph import matters, users, where
from .roles import MOVEMENTS, Role, Roles, moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from ..configs.base import BackendConfig
    from ..observers.qparams import Scheme
    from .draft import Draft


@dataclass(slots=True)
class Segment:
    """Movement nodes in a row, from a select (or the root) down to the next select."""

    tree: Tree
    values: list[Node] = field(default_factory=list)
    children: list[Segment] = field(default_factory=list)
    cell: str | None = None
    direct: str | None = None
    readers: list[Node] = field(default_factory=list)
    others: dict[str, list[Node]] = field(default_factory=dict)  # cells of another scheme

    @property
    def in_transit(self) -> bool:
        """Tell whether further branches begin below."""
        return bool(self.children)


@dataclass(slots=True)
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

    @property
    def read_otherwise_only(self) -> bool:
        """Tell whether quantized ops read it, but none in the scheme of its movement."""
        read = any(segment.readers for segment in self.segments)
        return not read and any(segment.others for segment in self.segments)

    def values(self) -> Iterator[Node]:
        """Go through the movement, each value after what it moves."""
        return (value for segment in self.segments for value in segment.values)


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
    trees, select = Trees(), Role.SELECT
    for node, role in roles.of.items():
        if role not in MOVEMENTS or (source := moved(node)) is None or not any(map(matters, node.users)):
            continue  # an item of a split that nothing reads is no branch
        parent = trees.segment_of.get(source)
        if parent is None:
            parent = trees.by_root.setdefault(source, Tree(source)).top
        segment = parent
        if role is select:
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
        draft.put_edge(source, reader, above)  # type: ignore[arg-type]
    draft.put(value, segment.cell)


def read_branch(draft: Draft, segment: Segment, value: Node, reader: Node, config: BackendConfig) -> str:
    """Put the edge from a value of a tree to a quantized op in its cell, and return the cell.

    A reader of another scheme than the tree's reads through a cell of its own, which is a branch of another family.
    """
    scheme = config.activation.scheme
    cell = segment.cell
    if segment.in_transit and cell not in draft.foreign:
        cell = segment.direct or cell
    if cell is not None and not alike(draft.base_scheme(cell), scheme):
        cell = draft.float_cell(value, config)
        segment.others.setdefault(cell, []).append(reader)
        draft.put_edge(value, reader, cell)
        return cell
    segment.readers.append(reader)
    if segment.in_transit and cell not in draft.foreign:
        if segment.direct is None:
            name = f"{value.name}->{reader.name}"
            segment.direct = draft.branch_cell(value, config, segment.tree.top.cell, name=name)
        cell = segment.direct
    elif cell is None:
        cell = segment.cell = draft.float_cell(segment.tree.root, config)
    draft.put_edge(value, reader, cell)
    return cell


def annotate_families(draft: Draft, trees: Trees, roles: Roles) -> None:
    """Record what may be decided for every tree that branches."""
    dropped: set[str] = set()
    for tree in trees.by_root.values():
        if tree.top.cell in draft.foreign:
            continue
        root_is_float = draft.output_cell(tree.root) is None
        root = tree.top.cell if tree.top.cell in draft.cells else None
        if root_is_float and root and tree.read_otherwise_only:
            dropped.add(root)  # moved in float to the readers, whose scheme is another
            root = None
        if not tree.branches:
            continue
        leaves = list(_leaves(draft, tree, roles))
        if root_is_float and any(not leaf.read_in_float for leaf in leaves):
            dropped |= {leaf.cell for leaf in leaves if leaf.read_in_float}
            leaves = [leaf for leaf in leaves if not leaf.read_in_float]
        draft.families += _families(draft, tree, root, leaves, roles, root_is_float=root_is_float)
    draft.drop_cells(dropped)


def _families(
    draft: Draft, tree: Tree, root: str | None, leaves: list[Leaf], roles: Roles, *, root_is_float: bool
) -> Iterator[Family]:
    """Yield one family for the leaves of each scheme; the root belongs to that of its own."""
    config = roles.configs[tree.segments[1].values[0]]
    by_scheme: dict[Scheme, list[Leaf]] = {draft.base_scheme(root): []} if root else {}
    for leaf in leaves:
        by_scheme.setdefault(draft.base_scheme(leaf.cell), []).append(leaf)
    for scheme, like_it in by_scheme.items():
        mine = root if root and scheme == draft.base_scheme(root) else None
        if like_it:
            yield Family(
                where=where(tree.root),
                root=mine,
                root_is_float=root_is_float or mine is None,
                leaves=tuple(like_it),
                wide=_wide(draft, mine, roles.configs.get(tree.root, config)) if mine else None,
                rules=config.branches,
            )


def _wide(draft: Draft, root: str, config: BackendConfig) -> Scheme | None:
    """Return the scheme of a widened root, where that is legal and can stand for the activation fused into it."""
    if Outcome.WIDE_ROOT not in config.branches.outcomes:
        return None
    bounds = draft.cells[root].contract
    return None if why_not_fused(bounds, INT16_SYMMETRIC, config.blocks) else INT16_SYMMETRIC


def _leaves(draft: Draft, tree: Tree, roles: Roles) -> Iterator[Leaf]:
    for segment in tree.segments:
        cell = segment.direct if segment.in_transit else segment.cell if segment is not tree.top else None
        if cell is not None and draft.holds_values(cell):
            cost_of_all = sum(roles.costs[reader] for reader in segment.readers)
            in_float = not segment.readers and not _met_quantized(segment, roles)
            yield Leaf(cell=cell, consumer_cost=cost_of_all, read_in_float=in_float)
        for other, readers in segment.others.items():
            yield Leaf(cell=other, consumer_cost=sum(roles.costs[reader] for reader in readers))


def _met_quantized(segment: Segment, roles: Roles) -> bool:
    """Tell whether a join reads the segment that its backend never leaves float: then it is no reader in float.

    Such a backend takes the movement for quantized too, and its input's qparams for its output's.
    """
    readers = (reader for value in segment.values for reader in users(value) if roles.role(reader) is Role.JOIN)
    return any(JoinOutcome.FLOAT not in roles.configs[reader].joins.outcomes for reader in readers)
