"""What became of each op, kept as it is found out: its role, its cells, and why it stays float where it does.

Plain data by node name, so that it outlives the graph; `reports` reads it beside the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..configs.ops import BATCH_NORMS
from ..observers.plan import Plan
from .graph import is_constant, is_float_tensor, module_path, op_name, value_of
from .neighbours import annotation_of
from .roles import Role, Roles, other_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.fx import Node

    from ..configs.base import BackendConfig
    from ..observers.ranges import Range
    from ..observers.resolution import Assignment
    from .draft import Places
    from .scope import Scope


class OpAccount(NamedTuple):
    """What became of one op.

    Args:
        node: its name.
        op: the canonical name of what it calls.
        module: path of the module that it comes from, "" for the root.
        role: what it is to the annotators.
        config: the name of the config that covers it, "" for none.
        block: the output node of the fused block that it is in, or "".
        inputs: (value that it reads, cell of that edge), for each edge that may be quantized.
        output: the cell of its output, or "".
        reads: the told ops and graph inputs whose float tensors it depends on, others between them passed over.
        why: why it stays float, or was left to another quantizer; "" where it did not.
    """

    node: str
    op: str
    module: str
    role: Role
    config: str = ""
    block: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    output: str = ""
    reads: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Account:
    """What one `annotate` call made of a graph, before anything was decided.

    Args:
        ops: every op that yields float tensors, in graph order.
        plan: the cells, and what was to be decided about them.
        weights: those of the cells that are weights.
        biases: those that are biases, derived from an input and a weight.
        assignments: what each cell ends up with, where that was decided at annotation time.
        ranges: the ranges that this was decided from.
        outputs: the told ops and graph inputs behind the graph's outputs.
    """

    ops: tuple[OpAccount, ...] = ()
    plan: Plan = field(default_factory=Plan)
    weights: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


def account_ops(
    nodes: Iterable[Node], roles: Roles, places: Places, scope: Scope, kept: Mapping[Node, str]
) -> tuple[tuple[OpAccount, ...], tuple[str, ...]]:
    """Return what became of each op of an annotated graph, and what its outputs come from (`Account.outputs`).

    Args:
        nodes: those of the graph, in its order.
        roles: the role of each node.
        places: the draft's, before anything was settled.
        scope: the user's rules.
        kept: nodes that were never ours to quantize, and why.
    """
    role_of, is_float = roles.of, Role.FLOAT
    outputs, reads = places
    block_of = {member: output.name for output, block in roles.blocks.items() for member in block.members}
    found = []
    above: tuple[str, ...] = ()
    sources: dict[Node, tuple[str, ...]] = {}
    for node in nodes:
        if node.op == "get_attr":
            sources[node] = ()
            continue
        values, name = node.all_input_nodes, node.name
        above = _above(values, sources)
        role = role_of.get(node, is_float)
        if node.op != "call_function" or (role is is_float and not _is_told(node)):
            sources[node] = (name,) if node.op == "placeholder" else above
            continue
        sources[node] = (name,)
        config = scope.config_of(node)
        edges = [(value.name, cell) for value, cell in reads[node].items()] if node in reads else ()
        why = _why_float(node, config, scope, kept) if role is is_float else ""
        op, module, covers = op_name(node) or str(node.target), module_path(node), config.name if config else ""
        block, output = block_of.get(node, ""), outputs.get(node, "")
        # By position: naming ten fields takes as long as all the rest.
        found.append(OpAccount(name, op, module, role, covers, block, tuple(edges), output, above, why))
    return tuple(found), above  # the last node is the output


def _above(values: Sequence[Node], sources: Mapping[Node, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the told ops and graph inputs behind the values that a node reads, each once."""
    if len(values) == 1:
        return sources[values[0]]
    return tuple(dict.fromkeys(name for value in values for name in sources[value]))


def _is_told(node: Node) -> bool:
    """Tell whether a float op is worth a line: it yields float tensors that depend on the input."""
    if is_constant(node):
        return False
    value = value_of(node)
    items = value if isinstance(value, (tuple, list)) else [value]
    floats = any(isinstance(item, torch.Tensor) and item.is_floating_point() for item in items)
    return floats and op_name(node) != "getitem"


def _why_float(node: Node, config: BackendConfig | None, scope: Scope, kept: Mapping[Node, str]) -> str:
    if node in kept:
        return kept[node]
    if annotation_of(node):
        return "left to the config's `rest`, which annotated it"
    return scope.why_float(node) if config is None else _why_not_run(node, config)


def _why_not_run(node: Node, config: BackendConfig) -> str:
    name, rules = op_name(node), config.ops
    if not is_float_tensor(node) and not isinstance(value_of(node), (tuple, list)):
        return "its output is empty, or of a dtype that quantize ops don't take"
    if name in config.blocks.heads:
        return "its weight is no constant"
    if name in BATCH_NORMS - rules.own:
        return "it follows no weighted op that it could be folded into"
    if name in rules.shared | rules.selects | rules.joins:
        return "it only carries values between float ops"
    if name in rules.own:
        return other_form(node, config) or "no float tensor goes in"
    return f"{config.name} runs no quantized {name or node.target}"
