"""Joins: several tensors that become one (cat, stack), the mirror image of branches.

The join's input edges and its output are one cell C, which sees every operand and so covers all of them. Whether
an operand's own cell is to have C's qparams too, or is requantized at the edge, is a decision:

    conv+relu6 (cell A) --edge in C--> cat --> C        A keeps zero_point == quant_min where C is signed
    x (float)           --edge in C--> cat
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from ..observers.plan import Join, JoinInput
from .blocks import clamp_bounds
from .draft import alike
from .graph import users, where
from .roles import MOVEMENTS, Role, Roles, moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from .branches import Trees
    from .draft import Draft


def annotate_join(draft: Draft, node: Node, roles: Roles) -> None:
    """Put the output of a join in a cell of its own."""
    config = roles.configs[node]
    draft.put(node, draft.new_cell(node.name, node, config))


def read_join(draft: Draft, node: Node, roles: Roles) -> None:
    """Put the input edges of a join in its output's cell."""
    cell = draft.outputs[node]
    for value in roles.read_by(node):
        draft.put_edge(value, node, cell)


def relate_wishes(draft: Draft, trees: Trees, links: Sequence[Sequence[str]], unlinked: Sequence[str]) -> list[str]:
    """Record which tensors the user linked and unlinked; return a message for each name that names none."""
    if not links and not unlinked:
        return []
    nodes = {node.name: node for node in draft.model.graph.nodes}
    messages = []

    def cell(name: str) -> str | None:
        found = _cell_of(draft, trees, nodes[name]) if name in nodes else None
        if found is None and name in nodes:
            messages.append(f"{where(nodes[name])} stays float: only quantized tensors can be linked, or kept apart")
        elif found is None:
            near = difflib.get_close_matches(name, nodes, n=3, cutoff=0.4)
            messages.append(f"no quantized tensor is called {name!r}{'; nearest: ' + ', '.join(near) if near else ''}")
        return found

    for link in links:
        cells = dict.fromkeys(found for name in link if (found := cell(name)) is not None)
        if len(cells) > 1:
            draft.links.append(tuple(cells))
    draft.apart |= {found for name in unlinked if (found := cell(name)) is not None}
    return messages


def relate_joins(draft: Draft, trees: Trees, roles: Roles) -> None:
    """Record what may be decided for every join (after all reads, when each cell's readers are known)."""
    join = Role.JOIN
    joins = [node for node, role in roles.of.items() if role is join]
    if not joins:
        return
    cell_of = {value: _cell_of(draft, trees, value) for node in joins for value in roles.read_by(node)}
    clamped = _clamped(roles)
    values, readers = _places_in(draft, {*cell_of.values(), *(draft.outputs[node] for node in joins)})
    outside: dict[str, set[Node]] = {}
    for node in joins:
        output = draft.outputs[node]
        found: dict[str, bool] = {}
        all_have_steps = all(value in draft.outputs and value not in clamped for value in roles.read_by(node))
        for value in roles.read_by(node):
            cell = cell_of[value]
            if cell is None or cell in draft.foreign or not _is_other(draft, cell, output):
                all_have_steps = False
                continue
            if cell not in outside:
                outside[cell] = _outside(values[cell], draft, cell)
            found[cell] = outside[cell] == {node}
        draft.joins.append(
            Join(
                where=where(node),
                output=output,
                inputs=tuple(JoinInput(cell=cell, exclusive=alone) for cell, alone in found.items()),
                may_float=all(each is node or roles.role(each) in MOVEMENTS for each in readers[output]),
                rules=roles.configs[node].joins,
                all_have_steps=all_have_steps,
            )
        )


def _cell_of(draft: Draft, trees: Trees, value: Node) -> str | None:
    """Return the cell that holds the operand's value elsewhere, or None if it is quantized at this edge alone."""
    segment = trees.segment(value)
    if segment is not None and segment.cell in draft.cells and draft.holds_values(segment.cell):
        return segment.cell
    return draft.outputs.get(value) or draft.existing_float_cell(value)


def _clamped(roles: Roles) -> set[Node]:
    """Return the values that a clamp with its input's qparams has bounded, seldom at one of their steps."""
    found: set[Node] = set()
    for node, role in roles.of.items():
        if role in MOVEMENTS and (clamp_bounds(node) is not None or moved(node) in found):
            found.add(node)
    return found


def _is_other(draft: Draft, cell: str, output: str) -> bool:
    """Tell whether an operand's cell is another than the join's, of the same scheme."""
    return cell != output and alike(draft.cells[cell].scheme, draft.cells[output].scheme)


def _places_in(draft: Draft, cells: set[str | None]) -> tuple[dict[str, set[Node]], dict[str, set[Node]]]:
    """Return, for each of the cells, the nodes whose values it holds, and those that read one through an edge in it."""
    values: dict[str, set[Node]] = {cell: set() for cell in cells if cell is not None}
    readers: dict[str, set[Node]] = {cell: set() for cell in values}
    for value, cell in draft.outputs.items():
        if cell in values:
            values[cell].add(value)
    for reader, edges in draft.reads.items():
        for value, cell in edges.items():
            if cell in values:
                values[cell].add(value)
                readers[cell].add(reader)
    return values, readers


def _outside(values: set[Node], draft: Draft, cell: str) -> set[Node]:
    """Return what reads the cell's values, but for movement inside the cell."""
    return {
        user
        for value in values
        for user in users(value)
        if draft.outputs.get(user) != cell and not any(draft.outputs.get(item) == cell for item in user.users)
    }
