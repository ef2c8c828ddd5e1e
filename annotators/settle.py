"""The ranges-first road: decide at annotation time, and redraw the draft as the decisions say.

What remains is a draft with nothing left to decide: cells that share are one cell, cells that stay float have no
places, and below a wide root a branch is int16 up to its reader's edge. So every outcome can be read on the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import Node

from ..observers.estimators import MinMaxEstimator
from ..observers.observer import exact_range
from ..observers.plan import Cell, Plan
from ..observers.ranges import UNBOUNDED
from ..observers.resolution import Resolution, resolve
from .graph import constant_tensor
from .measure import cell_entry
from .roles import MOVEMENTS, Role, Roles
from .writer import make_estimator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ..observers.estimators import Estimator
    from ..observers.qparams import QParams
    from ..observers.ranges import Range
    from ..observers.table import RangeTable
    from .draft import Draft, Place


@dataclass
class Settled:
    """A draft with nothing left to decide: its plan, what its observers have seen, ranges and decisions by cell."""

    plan: Plan
    presets: dict[str, Estimator]
    resolution: Resolution
    ranges: dict[str, Range]


def settle(draft: Draft, roles: Roles, plan: Plan, table: RangeTable, gone: Iterable[str] = ()) -> Settled:
    """Decide everything from the table's ranges and redraw the draft accordingly.

    `plan` is the draft's; `gone` are nodes that the table may name although the graph lost them before annotation.

    Raises:
        MissingRangeError: if the table lacks a tensor that is to be quantized, or names one that isn't there.
    """
    estimators = _estimators(draft, plan, table, gone)
    ranges: dict[str, Range] = {}
    exact: dict[str, Range] = {}
    for name, estimator in estimators.items():
        found, seen = estimator.range(plan.cells[name].scheme), exact_range(estimator)
        if found is not None and seen is not None:
            ranges[name], exact[name] = found, seen
    resolution = resolve(plan, ranges, exact)
    _redraw(draft, roles, resolution)
    return Settled(Plan(cells=_settled_cells(draft, plan, resolution)), estimators, resolution, ranges)


def _estimators(draft: Draft, plan: Plan, table: RangeTable, gone: Iterable[str]) -> dict[str, Estimator]:
    """Return what each activation's cell would have seen: the table's entries, and constants as they are."""
    constants: dict[str, Tensor] = {}
    for value in (*draft.outputs, *(value for edges in draft.reads.values() for value in edges)):
        if value.name not in constants and (tensor := constant_tensor(draft.model, value)) is not None:
            constants[value.name] = tensor
    cells = {n: c for n, c in plan.cells.items() if n not in draft.weights and n not in draft.biases}
    names = dict.fromkeys(v for cell in cells.values() for v in cell.values if v not in constants)
    table.require(names, [*gone, *(node.name for node in draft.model.graph.nodes)])
    found: dict[str, Estimator] = {}
    for name, cell in cells.items():
        constant = set(cell.values) <= set(constants)
        found[name] = MinMaxEstimator() if constant else make_estimator(draft.cells[name].config.activation)
        entry = cell_entry(cell.values, table, constants)
        if entry is not None:
            found[name].absorb(entry.estimator())
    return found


def _redraw(draft: Draft, roles: Roles, resolution: Resolution) -> None:
    floats = {name for name, found in resolution.assignments.items() if found.qparams is None}

    def cell_of(place: Place, cell: str) -> str | None:
        found = resolution.assignments.get(cell)
        if cell in floats or draft.cells[cell].follows & floats:
            return None
        if found is not None and found.root and _in_transit(place, roles):
            return resolution.assignments[found.root].group
        return found.group if found is not None else cell

    draft.redraw(cell_of)
    for name, bias in draft.biases.items():
        found = resolution.assignments.get(bias.input)
        if found is not None:
            draft.biases[name] = replace(bias, input=found.group)


def _in_transit(place: Place, roles: Roles) -> bool:
    """Tell whether the place is a movement's output, or an edge to one: still the root's own values."""
    return isinstance(place, Node) or roles.role(place[1]) in (*MOVEMENTS, Role.TUPLE)


def _settled_cells(draft: Draft, plan: Plan, resolution: Resolution) -> dict[str, Cell]:
    used = {*draft.outputs.values(), *(cell for edges in draft.reads.values() for cell in edges.values())}
    cells = {}
    for name, cell in plan.cells.items():
        if name not in used:
            continue
        found = resolution.assignments.get(name)
        if found is not None and found.qparams is not None:
            fixed: QParams | None = found.qparams
            scheme = found.qparams.scheme
            contract = cell.contract if not cell.may_unfold or found.qparams.honours(cell.contract) else UNBOUNDED
        else:
            fixed, scheme, contract = cell.fixed, cell.scheme, cell.contract
        # A bias asks the observers of its input and weight for their scales: they stay in one component.
        bias = draft.biases.get(name)
        sources = frozenset({bias.input, bias.weight}) if bias else frozenset()
        cells[name] = cell._replace(fixed=fixed, scheme=scheme, contract=contract, follows=sources)
    return cells
