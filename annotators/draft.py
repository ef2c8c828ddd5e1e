"""The plan while it is drawn up: cells with their places in the graph.

A place is a node's output or an input edge. Annotators put places in cells; the writer turns cells into torchao
annotations; `observers.resolution` decides about cells without seeing a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch.fx import Node

from ..observers.plan import Cell, Family, Hoist, Join, Plan
from ..observers.ranges import UNBOUNDED, Bounds
from .graph import where
from .neighbours import foreign_spec, matches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.fx.graph_module import GraphModule

    from ..configs.base import BackendConfig
    from ..observers.qparams import QParams, Scheme

Place = Node | tuple[Node, Node]
"""A node (its output) or a pair (producer, reader) (an input edge), as torchao refers to them."""


class Places(NamedTuple):
    """The places of a graph that are in cells.

    Args:
        outputs: node -> the cell of its output.
        reads: reader -> value -> the cell of that edge.
    """

    outputs: Mapping[Node, str]
    reads: Mapping[Node, Mapping[Node, str]]


def alike(first: Scheme, second: Scheme) -> bool:
    """Tell whether two schemes are equal; they mostly are one object, which is faster told than compared."""
    return first is second or first == second


@dataclass
class Weight:
    """A weight to observe: where it is read, and over which axis its channels run (None: one scale)."""

    cell: str
    config: BackendConfig
    channel_axis: int | None
    channels: int


@dataclass
class Bias:
    """A bias to derive: the cells of the input and of the weight whose scales multiply to its own.

    `channels` is its length where the weight has one scale per channel, else None.
    """

    config: BackendConfig
    input: str
    weight: str
    channels: int | None


@dataclass(slots=True)
class Sketch:
    """A cell while it is drawn up: see `Cell` for what the fields mean.

    `base` is the scheme of the config that it was made under (its own may be one-sided); `values` are in order.
    """

    name: str
    where: str
    config: BackendConfig
    scheme: Scheme
    base: Scheme
    contract: Bounds
    fixed: QParams | None
    follows: frozenset[str]
    may_unfold: bool = False
    headroom: float | None = None
    values: dict[str, None] = field(default_factory=dict)

    def cell(self) -> Cell:
        """Return the cell as data."""
        return Cell(
            self.name,
            self.where,
            self.scheme,
            tuple(self.values),
            self.contract,
            self.may_unfold,
            self.fixed,
            self.follows,
            self.headroom,
        )


@dataclass
class Draft:
    """Cells, places and relations that the annotators have found so far in one graph.

    Args:
        model: the graph module that is being annotated.
        config_of: node -> the config that applies to it, or None to leave it float.
        outputs, reads: see `Places`.
    """

    model: GraphModule
    config_of: Callable[[Node], BackendConfig | None]
    cells: dict[str, Sketch] = field(default_factory=dict)
    outputs: dict[Node, str] = field(default_factory=dict)
    reads: dict[Node, dict[Node, str]] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    biases: dict[str, Bias] = field(default_factory=dict)
    foreign: dict[str, Node] = field(default_factory=dict)
    families: list[Family] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    hoists: list[Hoist] = field(default_factory=list)
    links: list[tuple[str, ...]] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)
    _float_cells: dict[Node, str] = field(default_factory=dict)

    def new_cell(
        self,
        name: str,
        node: Node,
        config: BackendConfig,
        *,
        scheme: Scheme | None = None,
        contract: Bounds = UNBOUNDED,
        fixed: QParams | None = None,
        follows: frozenset[str] = frozenset(),
    ) -> str:
        """Add a cell, named after the node that it begins at, and return its name."""
        base = config.activation.scheme
        self.cells[name] = Sketch(name, where(node), config, scheme or base, base, contract, fixed, follows)
        return name

    @property
    def places(self) -> Places:
        """The places as they are; they are redrawn as a whole, so that what was asked for stays as it was."""
        return Places(self.outputs, self.reads)

    def put(self, value: Node, cell: str) -> None:
        """Put a node's output in a cell."""
        self.outputs[value] = cell
        self.cells[cell].values[value.name] = None

    def put_edge(self, value: Node, reader: Node, cell: str) -> None:
        """Put an edge in a cell; the value that it carries counts as one of the cell's."""
        edges = self.reads.get(reader)
        if edges is None:
            edges = self.reads[reader] = {}
        edges[value] = cell
        self.cells[cell].values[value.name] = None

    def edge(self, value: Node, reader: Node) -> str | None:
        """Return the cell of an edge, or None where it is float."""
        edges = self.reads.get(reader)
        return None if edges is None else edges.get(value)

    def holds_values(self, cell: str) -> bool:
        """Tell whether any place was put in the cell."""
        return bool(self.cells[cell].values)

    def output_cell(self, node: Node) -> str | None:
        """Return the cell of the node's output, or None where it is float.

        The output of a node that another quantizer annotated, with integers like ours, is a cell of that quantizer:
        we share in it and decide nothing about it.
        """
        cell = self.outputs.get(node)
        if cell is None and (spec := foreign_spec(node)) is not None:
            config = self.config_near(node)
            if config is not None and matches(spec, config.activation.scheme):
                cell = self.new_cell(f"{node.name}!", node, config)
                self.foreign[cell] = node
                self.put(node, cell)
        return cell

    def config_near(self, node: Node) -> BackendConfig | None:
        """Return the config of the first reader of a node that has one."""
        return next((found for user in node.users if (found := self.config_of(user)) is not None), None)

    def read(self, value: Node, reader: Node, config: BackendConfig) -> str:
        """Put the edge value -> reader in the cell of the value, and return it.

        A value that is float, or quantized with another scheme than the reader's, gets a cell of edges alone.
        """
        cell = self.output_cell(value)
        if cell is None or not alike(self.cells[cell].base, config.activation.scheme):
            cell = self.float_cell(value, config)
        self.put_edge(value, reader, cell)
        return cell

    def float_cell(self, value: Node, config: BackendConfig) -> str:
        """Return the cell of the edges that quantize a value which is float, or of another scheme."""
        scheme = config.activation.scheme
        name = f"{value.name}@{str(scheme.dtype).removeprefix('torch.')}[{scheme.quant_min},{scheme.quant_max}]"
        if scheme.symmetric:
            name += "s"
        if name not in self.cells:
            self.new_cell(name, value, config)
            self._float_cells[value] = name
        return name

    def existing_float_cell(self, value: Node) -> str | None:
        """Return the newest cell of edges that quantize the value, or None."""
        return self._float_cells.get(value)

    def branch_cell(self, value: Node, config: BackendConfig, root: str | None, *, name: str = "") -> str:
        """Return a new cell for a branch: of the root's scheme, where the root has a cell."""
        scheme = self.cells[root].scheme if root else None
        cell = self.new_cell(name or value.name, value, config, scheme=scheme)
        if root:
            self.cells[cell].base = self.cells[root].base
        return cell

    def base_scheme(self, cell: str) -> Scheme:
        """Return the scheme of the config that the cell was made under (its own may be one-sided)."""
        return self.cells[cell].base

    def drop_cells(self, names: set[str]) -> None:
        """Forget cells and their places: they stay float."""
        if not names:
            return
        self.cells = {name: cell for name, cell in self.cells.items() if name not in names}
        self.redraw(lambda _, cell: None if cell in names else cell)

    def redraw(self, cell_of: Callable[[Place, str], str | None]) -> None:
        """Put each place in the cell that `cell_of` names for it and its present one, or in none."""
        outputs = ((node, cell_of(node, cell)) for node, cell in self.outputs.items())
        self.outputs = {node: cell for node, cell in outputs if cell is not None}
        redrawn = {
            reader: {value: cell_of((value, reader), cell) for value, cell in edges.items()}
            for reader, edges in self.reads.items()
        }
        self.reads = {
            reader: {value: cell for value, cell in edges.items() if cell is not None}
            for reader, edges in redrawn.items()
        }

    def plan(self) -> Plan:
        """Return what was drawn up, as data."""
        return Plan(
            cells={
                name: sketch.cell() for name, sketch in self.cells.items() if sketch.values and name not in self.foreign
            },
            families=tuple(self.families),
            joins=tuple(self.joins),
            hoists=tuple(self.hoists),
            links=tuple(self.links),
            apart=frozenset(self.apart),
        )
