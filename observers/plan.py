r"""What may be decided about a model's tensors, as data: cells, branch families, joins, hoists and the user's wishes.

A *cell* is a set of places in the graph (a node's output, or one of its input edges) that hold the same values,
or parts of them, and so have one qparams whatever is decided. A *family* and a *join* relate cells:

    root cell R           family: may the leaves and R have one qparams, or does R stay float (or int16)
     |        |           while the leaves are grouped by their ranges?
    slice   slice
     |        |
    leaf A  leaf B
       \      /           join: may A, B and the output C have one qparams, or is an input requantized at
        cat               the join's edge (the edge belongs to C in any case)?
         |
         C

Cells are named by node names, so this module knows ranges and rules but no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from .ranges import UNBOUNDED, Bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .qparams import QParams, Scheme
    from .rules import BranchRules, JoinRules

T = TypeVar("T")


class Cell(NamedTuple):
    """A set of places that have one qparams.

    Args:
        name: unique in its plan; the node name of its first place.
        where: node name and module path, for messages.
        scheme: how its values are turned into integers.
        values: node names whose output values it holds.
        contract: bounds that saturation must reproduce, because an activation was fused away.
        may_unfold: the activation can still become an op of its own, and the contract be dropped.
        fixed: qparams that the backend dictates, or None.
        follows: cells that must all be quantized for this one to be: a weight follows its op's input and output,
            because kernels for int8 weights take and give int8 activations.
        headroom: what it may have at most of its scheme's headroom, or None.
    """

    name: str
    where: str
    scheme: Scheme
    values: tuple[str, ...] = ()
    contract: Bounds = UNBOUNDED
    may_unfold: bool = False
    fixed: QParams | None = None
    follows: frozenset[str] = frozenset()
    headroom: float | None = None


class Leaf(NamedTuple):
    """One branch of a family.

    Args:
        cell: the cell at its end.
        consumer_cost: multiply-accumulates (elements, where there are none) of the ops that read it: what keeping
            them in float would cost.
        read_in_float: no quantized op reads it, so that it is quantized only where it shares its root's qparams.
    """

    cell: str
    consumer_cost: int = 0
    read_in_float: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """The branches of one root tensor.

    Args:
        where: node name and module path of the root.
        root: the root's cell (with the movement ops above the leaves), or None where nothing quantizes it.
        root_is_float: the root is float whatever is decided: a graph input, or an unquantized op's output.
        leaves: the branches, in graph order; a direct edge from the root is one too.
        wide: the scheme of `Outcome.WIDE_ROOT`, or None.
        rules: what is legal.
    """

    where: str
    root: str | None
    root_is_float: bool
    leaves: tuple[Leaf, ...]
    rules: BranchRules
    wide: Scheme | None = None


@dataclass(frozen=True, kw_only=True)
class Hoist:
    """Cells whose quantize ops the backend's pass replaces by one above a tensor, if all of them are quantized.

    Args:
        where: node name and module path of that tensor.
        costs: cell -> what keeping its readers in float would cost, as `Leaf.consumer_cost`.
        rules: what the pass does, and what is to be done about it.
    """

    where: str
    costs: Mapping[str, int]
    rules: BranchRules


class JoinInput(NamedTuple):
    """One operand of a join: its cell, and whether the join is all that reads it."""

    cell: str
    exclusive: bool


@dataclass(frozen=True, kw_only=True)
class Join:
    """Several tensors that become one.

    Args:
        where: node name and module path of the join.
        output: the cell of its output and of its input edges.
        inputs: its operands that have cells, each cell once.
        may_float: no quantized op reads the output directly, so the join can be left float.
        rules: what is legal.
        all_have_steps: every operand is written quantized, so that its values lie on the steps of its cell already:
            none is float up to the join, and none a clamp whose bound lies between two steps. A cat of two pools, say,
            and not a cat with the model's input.
    """

    where: str
    output: str
    inputs: tuple[JoinInput, ...]
    may_float: bool
    rules: JoinRules
    all_have_steps: bool = False


_NONE: Final[dict[str, Cell]] = {}


class Plan(NamedTuple):
    """All cells of a model and what may be decided about them, in graph order.

    Args:
        cells: by name.
        families: branch families.
        joins: joins.
        hoists: tensors above which a backend's pass may hoist one quantize.
        links: cells that the user wants to share qparams.
        apart: cells that the user wants to share with nothing else.
    """

    cells: Mapping[str, Cell] = _NONE
    families: tuple[Family, ...] = ()
    joins: tuple[Join, ...] = ()
    hoists: tuple[Hoist, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    apart: frozenset[str] = frozenset()

    def components(self, *, following: bool = True) -> tuple[Plan, ...]:
        """Return the plan cut into independent plans: no decision of one looks at a cell of another.

        Without `following`, a cell may be cut off from those that it follows: what is decided is the same, but for the
        cells that stay float because one that they follow does.
        """
        parent = {name: name for name in self.cells}

        def find(name: str) -> str:
            while parent[name] != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        linked = [(name, *c.follows) for name, c in self.cells.items() if c.follows] if following else []
        linked += [family_cells(family) for family in self.families]
        linked += [(j.output, *(i.cell for i in j.inputs)) for j in self.joins]
        linked += [tuple(hoist.costs) for hoist in self.hoists]
        linked += self.links
        for first, *others in linked:
            for name in others:
                if name in parent:  # what a cell follows may lie in another plan
                    parent[find(name)] = find(first)
        cells: dict[str, dict[str, Cell]] = {}
        for name, cell in self.cells.items():
            root = find(name)
            if root not in cells:
                cells[root] = {}
            cells[root][name] = cell
        families = _by_root(self.families, lambda family: find(family.leaves[0].cell))
        joins = _by_root(self.joins, lambda join: find(join.output))
        hoists = _by_root(self.hoists, lambda hoist: find(next(iter(hoist.costs))))
        links = _by_root(self.links, lambda link: find(link[0]))
        return tuple(
            Plan(
                cells=held,
                families=tuple(families.get(root, ())),
                joins=tuple(joins.get(root, ())),
                hoists=tuple(hoists.get(root, ())),
                links=tuple(links.get(root, ())),
                apart=self.apart & held.keys() if self.apart else self.apart,
            )
            for root, held in cells.items()
        )


def _by_root(items: Iterable[T], root_of: Callable[[T], str]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for each in items:
        found.setdefault(root_of(each), []).append(each)
    return found


def family_cells(family: Family) -> tuple[str, ...]:
    """Return the names of the cells that a family relates: the root's, if it has one, then the leaves'."""
    return (*([family.root] if family.root else []), *(leaf.cell for leaf in family.leaves))
