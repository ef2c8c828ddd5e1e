r"""Fused blocks: a weighted op, an optional batch norm, an optional activation, quantized at the borders only.

 x   w   b                 input edge   -> cell of x
  \  |  /                  weight edge  -> cell of w, per output channel
   head                    bias edge    -> float, or derived from input and weight
    |
batch_norm   (QAT only)    nothing between the members
    |
 dropout ..  (no-ops)
    |
 clamp(s)                  output       -> cell with the clamp as its contract
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from torch.fx import Node

from ..configs.base import BiasKind, SymmetricActivation
from ..configs.ops import BATCH_NORMS, HEADS, HeadRule
from ..observers.qparams import INT32
from ..observers.ranges import UNBOUNDED, Bounds
from .draft import Bias, Draft, Weight
from .folding import is_folded
from .graph import argument, is_constant, is_float_tensor, number, numel, op_name, rank, users, value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..configs.base import BackendConfig, BlockRules
    from ..observers.qparams import Scheme


class Block(NamedTuple):
    """One fused block.

    Args:
        head: the weighted op, or the residual op.
        members: every node from head to output, in order.
        bounds: what its activations guarantee of the output.
        scheme: of the output (one-sided for a relu in a symmetric scheme).
        unfused: why an activation that follows was not taken in, or "".
        rule: where a weighted head keeps its operands; None for a residual op.
    """

    head: Node
    members: tuple[Node, ...]
    bounds: Bounds
    scheme: Scheme
    unfused: str = ""
    rule: HeadRule | None = None

    @property
    def output(self) -> Node:
        """The node whose value leaves the block."""
        return self.members[-1]


_PLAIN: Final = {"relu": Bounds(0.0, None), "relu6": Bounds(0.0, 6.0)}
_ENDS: Final = {
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min", None),
    "clamp_max": (None, "max"),
}


def clamp_bounds(node: Node) -> Bounds | None:
    """Return the bounds of a clamping activation in any of its spellings, or None if it isn't one.

    A clamp whose bound is a tensor, or a threshold that is no relu, is none.
    """
    name = op_name(node)
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "threshold":
        is_relu = number(node, "threshold") == 0.0 and number(node, "value") == 0.0
        return Bounds(0.0, None) if is_relu else None
    if name not in _ENDS:
        return None
    found = [_bound(node, end) for end in _ENDS[name]]
    low, high = (None if end is not None and math.isinf(end) else end for end in found)
    if any(isinstance(argument(node, end), Node) for end in _ENDS[name] if end):
        return None
    if any(end is not None and math.isnan(end) for end in found):
        return None
    if low is not None and high is not None and low > high:
        return Bounds(high, high)  # torch.clamp: the maximum wins
    return Bounds(low, high)


def _bound(node: Node, end: str | None) -> float | None:
    return None if end is None else number(node, end)


def why_not_fused(bounds: Bounds, scheme: Scheme, rules: BlockRules) -> str:
    """Return why saturation can't stand for a clamp to `bounds` in `scheme`, or "" if it can.

    Every scheme keeps 0 exact, so saturation can't stand for a clamp that excludes 0.
    """
    low, high = bounds.lower, bounds.upper
    if (low is not None and low > 0.0) or (high is not None and high < 0.0):
        return "its bounds exclude 0, which is always representable"
    if not scheme.symmetric or not bounds.is_bounded:
        return ""
    if low == 0.0:
        separate = rules.symmetric_activation is SymmetricActivation.SEPARATE
        return "zero_point != quant_min in a symmetric scheme, and the config keeps it separate" if separate else ""
    if low is None or high is None or low != -high:
        return "a symmetric scheme can only saturate at ends of equal size"
    return ""


def output_scheme(bounds: Bounds, scheme: Scheme) -> Scheme:
    """Return the scheme of a block's output: one-sided where a symmetric scheme meets a lower bound of 0."""
    return scheme.one_sided() if scheme.symmetric and bounds.lower == 0.0 else scheme


def head_rule(node: Node, config: BackendConfig) -> HeadRule | None:
    """Return the rule of a weighted op that the config runs quantized, or None."""
    name = op_name(node)
    rule = HEADS.get(name) if name in config.blocks.heads else None
    if rule is None or not is_float_tensor(node):
        return None
    weight = argument(node, rule.weight)
    if not isinstance(weight, Node) or not is_constant(weight) or not is_float_tensor(weight):
        return None
    if name in {"mm", "matmul"} and rank(weight) != 2:
        return None
    if name == "convolution" and argument(node, "transposed"):
        rule = HeadRule(rule.input, rule.weight, rule.bias, 1, transposed=True)
    return rule


def find_block(head: Node, config: BackendConfig, accepts: Callable[[Node], bool], rule: HeadRule | None) -> Block:
    """Return the block that begins at `head`: as far down as each member has one reader and may be fused.

    `accepts` says of a node whether it is free and under the same config; `rule` is that of `head_rule`, None for a
    residual op.
    """
    members, bounds, unfused = [head], UNBOUNDED, ""
    pending: list[Node] = []  # no-ops that only belong to the block if a clamp follows
    scheme = config.activation.scheme
    rules = config.blocks
    name = op_name(head)
    foldable = rules.activations if name in HEADS else rules.residual_activations
    if name in HEADS and rules.activation_heads is not None and name not in rules.activation_heads:
        foldable = frozenset()
    node = head
    while (follower := _only_reader(node)) is not None:
        name = op_name(follower)
        folds = name in foldable
        if not (folds or name in rules.through or name in BATCH_NORMS) or not accepts(follower):
            break
        if node is head and name in BATCH_NORMS and _is_folded(head, follower, rule, config):
            members.append(follower)
        elif name in rules.through and is_float_tensor(follower) and not _drops(follower):
            pending.append(follower)
        elif folds and (then := clamp_bounds(follower)) is not None:
            joined = bounds.then(then) if bounds.is_bounded else then
            unfused = why_not_fused(joined, scheme, rules)
            if unfused:
                break
            bounds = joined
            members += [*pending, follower]
            pending = []
        else:
            break
        node = follower
    return Block(head, tuple(members), bounds, output_scheme(bounds, scheme), unfused, rule)


def _is_folded(head: Node, norm: Node, rule: HeadRule | None, config: BackendConfig) -> bool:
    return rule is not None and is_folded(head, norm, rule, config, per_channel=is_per_channel(head, rule, config))


def is_in_block(norm: Node, config: BackendConfig) -> bool:
    """Tell whether a batch norm is taken in by the weighted op that it alone reads."""
    head = norm.args[0]
    if not isinstance(head, Node) or _only_reader(head) is not norm:
        return False
    return _is_folded(head, norm, head_rule(head, config), config)


def _only_reader(node: Node) -> Node | None:
    readers = users(node) if len(node.users) > 1 else list(node.users)
    if len(readers) != 1 or readers[0].op != "call_function":
        return None
    args = readers[0].args
    return readers[0] if args and args[0] is node else None


def _drops(node: Node) -> bool:
    """Tell whether a dropout is in train mode, where it changes values."""
    return "dropout" in op_name(node) and bool(argument(node, 2 if op_name(node) != "native_dropout" else "train"))


def annotate_head(
    draft: Draft, block: Block, rule: HeadRule, config: BackendConfig, read: Callable[[Node, Node], str]
) -> None:
    """Put the input, weight and bias edges of a weighted op in their cells; `read` places an activation's edge."""
    head = block.head
    source = argument(head, rule.input)
    weight = argument(head, rule.weight)
    if not isinstance(source, Node) or not isinstance(weight, Node):
        return
    entry = read(source, head)
    follows = frozenset({entry, draft.outputs[block.output]})
    per_channel = is_per_channel(head, rule, config)
    cell = f"{weight.name}#{rule.channel_axis if per_channel else 'tensor'}"
    if cell in draft.cells:  # of a layer called twice, say: one call may stay float, and the other not
        cell = f"{cell}->{head.name}"
    scheme = config.weight.conv_scheme if "conv" in op_name(head) else None
    draft.new_cell(cell, weight, config, scheme=scheme or config.weight.scheme, follows=follows)
    draft.weights[cell] = _weight(cell, weight, rule.channel_axis if per_channel else None, config)
    draft.put_edge(weight, head, cell)
    bias = argument(head, rule.bias) if rule.bias is not None else None
    if isinstance(bias, Node) and config.bias.kind is BiasKind.INT32_DERIVED:
        name = f"{bias.name}->{head.name}"
        draft.new_cell(name, bias, config, scheme=INT32, follows=follows | {cell})  # it asks the weight for its scale
        draft.biases[name] = Bias(config, entry, cell, numel(bias) if per_channel else None)
        draft.put_edge(bias, head, name)


def is_per_channel(head: Node, rule: HeadRule, config: BackendConfig) -> bool:
    """Tell whether the weight gets one scale per output channel; the backend may lack it for some ops."""
    weight = argument(head, rule.weight)
    if not config.weight.per_channel or op_name(head) in config.blocks.per_tensor_heads:
        return False
    if rule.transposed and argument(head, "groups") != 1 and "grouped_transposed" in config.blocks.per_tensor_heads:
        return False
    return isinstance(weight, Node) and rank(weight) > 1


def _weight(cell: str, weight: Node, axis: int | None, config: BackendConfig) -> Weight:
    shape = getattr(value_of(weight), "shape", (1,))
    return Weight(cell, config, axis, int(shape[axis]) if axis is not None else 1)
