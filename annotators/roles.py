"""What each node of a graph is to the annotators: the head or inside of a block, a movement, a join, ..."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch.fx import Node

from .blocks import Block, find_block, head_rule
from .facts import Costs, FloatTensors
from .graph import argument, is_constant, op_name, rank, users, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx.graph_module import GraphModule

    from ..configs.base import BackendConfig


class Role(Enum):
    """What a node is to the annotators.

    Python 3.11 takes as long to look a member up as to call a function; loops over a whole graph do it once.
    """

    FLOAT = "float"
    """Not ours: an input, a constant, an op that stays float."""
    BLOCK = "block"
    """The output of a fused block."""
    INSIDE = "inside"
    """A member of a fused block that is not its output."""
    OWN = "own"
    """Inputs quantized, output with qparams of its own."""
    MOVE = "move"
    """Values are moved, repeated or picked: qparams pass through."""
    SELECT = "select"
    """As MOVE, but a part is read: a branch begins here."""
    TUPLE = "tuple"
    """A movement whose value is a tuple; its getitem nodes hold the values."""
    JOIN = "join"
    """Several inputs become one output."""


IMAGE_RANK = 4  # [N, C, H, W]
MOVEMENTS = (Role.MOVE, Role.SELECT)
_QUANTIZED_OPS = (Role.BLOCK, Role.INSIDE, Role.OWN)
_PASSING = (*MOVEMENTS, Role.JOIN)
_FLOAT_OPERANDS = {  # operands that are activations, by position; all tensors where an op is not listed
    "layer_norm": (0,),
    "native_layer_norm": (0,),
    "group_norm": (0,),
    "instance_norm": (0,),
    "batch_norm": (0,),
    "prelu": (0,),
    "where": (1, 2),
    "masked_fill": (0,),
}


@dataclass
class Roles:
    """The role of every node, the blocks, and the config of each node that is quantized."""

    of: dict[Node, Role] = field(default_factory=dict)
    blocks: dict[Node, Block] = field(default_factory=dict)
    configs: dict[Node, BackendConfig] = field(default_factory=dict)
    floats: FloatTensors = field(default_factory=FloatTensors)
    costs: Costs = field(default_factory=Costs)
    _reads: dict[Node, list[Node]] = field(default_factory=dict)

    def role(self, node: Node) -> Role:
        """Return the node's role; FLOAT for nodes that nothing was said of."""
        return self.of.get(node) or Role.FLOAT

    def is_quantized_op(self, node: Node) -> bool:
        """Tell whether the node computes on quantized inputs (movement and joins merely pass values on)."""
        return self.of.get(node) in _QUANTIZED_OPS

    def read_by(self, node: Node) -> list[Node]:
        """Return the operands of an elementwise op or join that are float activations or constants."""
        found = self._reads.get(node)
        if found is None:
            floats, positions = self.floats, _FLOAT_OPERANDS.get(op_name(node))
            operands = node.all_input_nodes if positions is None else [argument(node, each) for each in positions]
            found = self._reads[node] = [each for each in operands if isinstance(each, Node) and floats[each]]
        return found


def moved(node: Node) -> Node | None:
    """Return the tensor that a movement moves (for a getitem: the tensor that its tuple was cut from)."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and node.target is operator.getitem:
        source = source.args[0] if source.args else None
    return source if isinstance(source, Node) else None


def assign_roles(model: GraphModule, config_of: Callable[[Node], BackendConfig | None]) -> Roles:
    """Return the role of every node that may be quantized, going through the graph once."""
    roles = Roles()
    for node in model.graph.nodes:
        if node.op != "call_function" or node in roles.of or (config := config_of(node)) is None:
            continue
        name = op_name(node)
        begins = name in config.blocks.heads or (name in config.blocks.residual_heads and _may_fuse(node, config))
        if begins and _take_block(node, config, config_of, roles):
            continue
        if (role := _plain_role(node, name, config, roles)) is not None:
            roles.of[node] = role
            roles.configs[node] = config
    _drop_idle_movement(roles)
    return roles


def _may_fuse(node: Node, config: BackendConfig) -> bool:
    """Tell whether a residual op may be more than a block of its own: most are read by nothing that could be fused."""
    rules = config.blocks
    names = [op_name(user) for user in node.users]
    return any(name in rules.residual_activations or name in rules.through for name in names)


def _take_block(
    head: Node, config: BackendConfig, config_of: Callable[[Node], BackendConfig | None], roles: Roles
) -> bool:
    def accepts(node: Node) -> bool:
        return node not in roles.of and ((theirs := config_of(node)) is config or theirs == config)

    rule = head_rule(head, config)
    block = find_block(head, config, accepts, rule)
    if rule is None and (len(block.members) == 1 or not _is_residual_head(head, config, roles)):
        return False
    *inside, output = block.members
    for member in inside:
        roles.of[member] = Role.INSIDE
        roles.configs[member] = config
    roles.blocks[output] = block
    roles.of[output] = Role.BLOCK
    roles.configs[output] = config
    return True


def _is_residual_head(node: Node, config: BackendConfig, roles: Roles) -> bool:
    name = op_name(node)
    if name not in config.blocks.residual_heads or name not in config.ops.own or not roles.floats[node]:
        return False
    return _is_own(node, config, roles)


def _is_own(node: Node, config: BackendConfig, roles: Roles) -> bool:
    return bool(roles.read_by(node)) and not other_form(node, config)


def _plain_role(node: Node, name: str, config: BackendConfig, roles: Roles) -> Role | None:
    rules = config.ops
    if name == "getitem":
        return _getitem_role(node, config, roles)
    selects = name in rules.selects
    moves = selects or name in rules.shared
    if not (moves or name in rules.joins or name in rules.own):
        return None
    is_float = roles.floats[node]
    if moves:
        if is_constant(node) or not (is_float or isinstance(value_of(node), (tuple, list))):
            return None
        source = moved(node)
        if source is not None and roles.floats[source]:
            return Role.TUPLE if not is_float else Role.SELECT if selects else Role.MOVE
    if not is_float:
        return None
    if name in rules.joins:
        return Role.JOIN
    return Role.OWN if name in rules.own and _is_own(node, config, roles) else None


def other_form(node: Node, config: BackendConfig) -> str:
    """Return why the backend runs no quantized op for this form of an op that it runs in another, or ""."""
    name = op_name(node)
    if name in {"add", "sub", "rsub"} and argument(node, "alpha") not in {None, 1}:
        return "it scales an operand by alpha, which no quantized kernel does"
    if name == "div" and argument(node, "rounding_mode") is not None:
        return "it rounds its quotient, which no quantized kernel does"
    if not config.ops.global_pools_only:
        return ""
    if name == "mean":
        dims = argument(node, "dim")
        axes = {int(d) % 4 for d in dims if isinstance(d, int)} if isinstance(dims, (list, tuple)) else set()
        asked = rank(node) == IMAGE_RANK and axes == {2, 3} and bool(argument(node, "keepdim"))
    elif name == "adaptive_avg_pool2d":
        asked = rank(node) == IMAGE_RANK and list(argument(node, "output_size") or ()) == [1, 1]  # type: ignore[arg-type]
    else:
        return ""
    return "" if asked else "the backend runs global pools of images only, with keepdim=True"


def _getitem_role(node: Node, config: BackendConfig, roles: Roles) -> Role | None:
    parent = node.args[0]
    if not isinstance(parent, Node) or not roles.floats[node]:
        return None
    name, source = op_name(parent), moved(node)
    if source is None or not roles.floats[source]:
        return None
    if name in config.ops.selects:
        return Role.SELECT
    return Role.MOVE if name in config.ops.shared and node.args[1] == 0 else None


def _drop_idle_movement(roles: Roles) -> None:
    """Leave movement and joins float where they only carry values between float ops.

    Value-preserving nodes that hang together are one island. It is quantized if a quantized op writes or reads it,
    or if it touches nothing but the graph's inputs, outputs and constants (quantized IO); an island among float
    ops would only lose precision.
    """
    island: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while island[node] is not node:
            island[node] = island[island[node]]
            node = island[node]
        return node

    nodes = [node for node, role in roles.of.items() if role in _PASSING]
    island.update({node: node for node in nodes})
    for node in nodes:
        for source in _sources(node, roles):
            if source in island:
                island[find(source)] = find(node)
    touched: dict[Node, bool] = {}  # per island that has neighbours: is any of them quantized?
    for node in nodes:
        root = find(node)
        if touched.get(root, False):
            continue
        if any(map(roles.is_quantized_op, node.users)):  # mostly so, and sooner told than by the walk below
            touched[root] = True
            continue
        around = [each for each in _neighbours(node, roles) if each not in island]
        if around:
            touched[root] = any(map(roles.is_quantized_op, around))
    for node in nodes:
        if not touched.get(find(node), True):
            del roles.of[node]
    tuples = Role.TUPLE
    for node in [node for node, role in roles.of.items() if role is tuples]:
        if not any(roles.role(u) in MOVEMENTS for u in node.users):
            del roles.of[node]


def _neighbours(node: Node, roles: Roles) -> Iterator[Node]:
    """Go through the ops that write what a value-preserving node reads, then those that read it."""
    yield from (s for s in _sources(node, roles) if s.op == "call_function" and not is_constant(s))
    yield from (u for u in _readers(node) if u.op == "call_function" and op_name(u) != "getitem")


def _sources(node: Node, roles: Roles) -> list[Node]:
    if roles.of[node] is Role.JOIN:
        return roles.read_by(node)
    source = moved(node)
    return [source] if source is not None else []


def _readers(node: Node) -> list[Node]:
    """Return the readers of a value, seeing through tuples to their items."""
    found = []
    for user in users(node):
        found += (
            list(user.users) if isinstance(value_of(user), (tuple, list)) and user.op == "call_function" else [user]
        )
    return found
