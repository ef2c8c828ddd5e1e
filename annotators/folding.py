"""Batch norms inside blocks: who folds them into the weight, and the fold that torchao leaves to us.

torchao folds a batch norm into conv1d, conv2d, conv_transpose1d and conv_transpose2d: before annotation, or (after
quantization-aware training) at conversion. Behind conv3d, conv_transpose3d, string paddings or a linear in training it
leaves the batch norm between the members of the block, where no backend can run it quantized. With one scale per
output channel that fold is exact at conversion: in evaluation the batch norm is, per channel,

    k * (W x + b - mean) + beta,  k = gamma / sqrt(var + eps)    =    (k W) x + (k * (b - mean) + beta)

and k * W has the codes of W (negated where k < 0) with |k| times its scale, so that training saw the same rounding.

A batch norm that follows no weighted op is in evaluation the depthwise convolution with W = 1, and is spelled so: with
a scale per channel its factors are exact, its offsets are a bias, and an activation behind it folds like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node
from torchao.quantization.pt2e.utils import create_getattr_from_value

from ..configs.base import BiasKind
from ..configs.ops import BATCH_NORMS, HEADS
from ..observers.errors import AnnotationError
from ..observers.qparams import choose_channel_qparams
from .graph import argument, constant_tensor, is_constant, is_float_tensor, op_name, rank, users, value_of, where

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

    from ..configs.base import BackendConfig
    from ..configs.ops import HeadRule
    from ..observers.observer import PerChannelRangeObserver

    WritePair = Callable[[Node, Node, Tensor, Tensor], Node]

_ATEN = torch.ops.aten
_TORCHAO_FOLDS: Final[dict[object, int]] = {  # in the order in which it does
    _ATEN.conv1d.default: 0,
    _ATEN.conv2d.default: 1,
    _ATEN.conv_transpose1d.default: 2,
    _ATEN.conv_transpose2d.input: 3,
}
_DEPTHWISE: Final = {1: _ATEN.conv1d.default, 2: _ATEN.conv2d.default, 3: _ATEN.conv3d.default}  # by spatial axes
_STATISTICS: Final = ("weight", "bias", "running_mean", "running_var")


def order_in_training(model: GraphModule) -> list[Node]:
    """Return the nodes in the order that they have after `prepare_qat_pt2e`, which reads annotations in that order.

    torchao (0.18) puts a convolution and its batch norm anew before the first reader of the norm, kind by kind, those
    with a bias first. A shared spec must come after the one that it names, or torchao stops with an AssertionError.
    """
    place = {node: index for index, node in enumerate(model.graph.nodes)}

    def key(node: Node) -> tuple[float, int, bool]:
        norm = next(iter(node.users)) if len(node.users) == 1 else node
        is_pair = node.target in _TORCHAO_FOLDS and op_name(norm) in BATCH_NORMS
        if not is_pair or not isinstance(argument(norm, "weight"), Node):
            return place[node], 0, False
        reader = min((place[user] for user in norm.users), default=place[norm])
        return reader - 0.5, _TORCHAO_FOLDS[node.target], argument(node, 2) is None

    return sorted(place, key=key)


def part_norms(model: GraphModule) -> None:
    """Keep torchao from folding a batch norm into a weight, or into an output, that something else reads too.

    It does so (0.18) for all readers: they get the normed values, and nothing tells.
    """
    parted = False
    for norm in [each for each in model.graph.nodes if op_name(each) == "batch_norm"]:
        source = norm.args[0]
        if isinstance(source, Node) and (op_name(source) == "batch_norm" or _is_read_elsewhere(source)):
            parted = True
            with model.graph.inserting_before(norm):
                alias = model.graph.call_function(_ATEN.alias.default, (source,))
            alias.meta = dict(source.meta)
            norm.replace_input_with(source, alias)
    if parted:
        model.recompile()


def _is_read_elsewhere(head: Node) -> bool:
    rule = HEADS.get(op_name(head))
    weight = argument(head, rule.weight) if rule is not None else None
    if not isinstance(weight, Node):
        return False
    mentions = head.graph.find_nodes(op="get_attr", target=weight.target)
    return len(users(head)) > 1 or sum(len(mention.users) for mention in mentions) > 1


def gets_bias(head: Node) -> bool:
    """Tell whether torchao gives the head a bias when it folds the batch norm behind it after training."""
    readers = users(head)
    return head.target in _TORCHAO_FOLDS and len(readers) == 1 and op_name(readers[0]) == "batch_norm"


def is_folded(head: Node, norm: Node, rule: HeadRule, config: BackendConfig, *, per_channel: bool) -> bool:
    """Tell whether the batch norm behind a head will be gone after conversion, so that it belongs to the block."""
    if op_name(norm) != "batch_norm" or (rule.transposed and argument(head, "groups") != 1):
        return False
    if head.target in _TORCHAO_FOLDS and isinstance(argument(norm, "weight"), Node):
        return True
    if not per_channel or rule.bias is None or config.bias.kind is not BiasKind.FLOAT:
        return False
    if "conv" not in op_name(head) and rank(head) != 2:
        return False  # the batch norm's channels are not the head's
    needed = [argument(head, rule.bias), *(argument(norm, name) for name in _STATISTICS)]
    present = all(argument(norm, name) is not None for name in _STATISTICS[2:])
    return present and all(each is None or (isinstance(each, Node) and is_constant(each)) for each in needed)


def fold_batch_norms(
    model: GraphModule, dequantized: Node, observer: PerChannelRangeObserver, write_pair: WritePair
) -> None:
    """Fold the batch norm behind each head that reads a per-channel weight, where one is left.

    `write_pair` (weight, place, scale, zero_point) writes a quantize/dequantize pair before a place.
    """
    quantized = dequantized.args[0]
    weight = quantized.args[0] if isinstance(quantized, Node) else None
    values = constant_tensor(model, weight) if isinstance(weight, Node) else None
    if values is None:
        return
    for head in list(dequantized.users):
        norm = next(iter(users(head)), None)
        if norm is None or len(head.users) != 1 or op_name(norm) != "batch_norm":
            continue
        rule = HEADS.get(op_name(head))
        if rule is not None and rule.bias is not None and argument(head, rule.weight) is dequantized:
            factor, offset = _factor_and_offset(model, norm, argument(head, rule.bias))
            _fold(model, head, _Folded(rule.weight, rule.bias, values, factor, offset), observer, write_pair)
            norm.replace_all_uses_with(head)
            _drop_counter(norm)
            head.graph.erase_node(norm)


@dataclass(frozen=True)
class _Folded:
    """Where a head keeps weight and bias, the weight's values, and what the batch norm does to both."""

    weight_index: int
    bias_index: int
    values: Tensor
    factor: Tensor
    offset: Tensor


def spell_batch_norm(model: GraphModule, norm: Node, config: BackendConfig) -> bool:
    """Spell a batch norm of a graph in evaluation that no weighted op takes in as a depthwise convolution."""
    source, axes = argument(norm, 0), rank(norm) - 2
    if axes not in _DEPTHWISE or f"conv{axes}d" not in config.blocks.heads or not config.weight.per_channel:
        return False
    if config.is_qat or argument(norm, "training") or not isinstance(source, Node) or not is_float_tensor(norm):
        return False
    statistics = [argument(norm, name) for name in _STATISTICS]
    if any(each is None for each in statistics[2:]):
        return False
    if not all(each is None or (isinstance(each, Node) and is_constant(each)) for each in statistics):
        return False
    if source.target is _ATEN.alias.default and len(source.users) == 1 and isinstance(source.args[0], Node):
        source = source.args[0]  # what `part_norms` put between
    factor, offset = _factor_and_offset(model, norm, None)
    dtype = getattr(value_of(source), "dtype", torch.float32)
    channels = len(factor)
    weight = _attribute(model, norm, "_norm_weight_", factor.reshape([channels, 1] + [1] * axes).to(dtype))
    bias = _attribute(model, norm, "_norm_bias_", offset.to(dtype))
    norm.target = _DEPTHWISE[axes]
    between = norm.args[0]
    norm.args, norm.kwargs = (source, weight, bias, [1] * axes, [0] * axes, [1] * axes, channels), {}
    if isinstance(between, Node) and not between.users and between is not source:
        norm.graph.erase_node(between)
    return True


def _fold(
    model: GraphModule, head: Node, what: _Folded, observer: PerChannelRangeObserver, write_pair: WritePair
) -> None:
    ends = torch.stack([observer.channel_min * what.factor, observer.channel_max * what.factor])
    scale, zero_point = choose_channel_qparams(ends.amin(0), ends.amax(0), observer.scheme)
    shape = [-1 if axis == observer.ch_axis else 1 for axis in range(what.values.dim())]
    dtype = what.values.dtype
    with torch.no_grad():
        folded = (what.values.float() * what.factor.reshape(shape)).to(dtype)
    new_weight = _attribute(model, head, "_folded_weight_", folded)
    args = [argument(head, i) for i in range(max(len(head.args), what.weight_index + 1, what.bias_index + 1))]
    args[what.weight_index] = write_pair(new_weight, head, scale, zero_point)
    args[what.bias_index] = _attribute(model, head, "_folded_bias_", what.offset.to(dtype))
    head.args = tuple(args)


def _factor_and_offset(model: GraphModule, norm: Node, bias: object) -> tuple[Tensor, Tensor]:
    """Return k and k * (b - mean) + beta, each of shape [channels], in float32."""
    gamma, beta, mean, var, b = (
        constant_tensor(model, node).detach().float() if isinstance(node, Node) else None  # type: ignore[union-attr]
        for node in (*(argument(norm, name) for name in _STATISTICS), bias)
    )
    eps = argument(norm, "eps")
    if mean is None or var is None or not isinstance(eps, float):
        raise AnnotationError(f"{where(norm)}: a batch norm without running statistics can't be folded")
    factor = torch.rsqrt(var + eps) * (1.0 if gamma is None else gamma)
    offset = factor * ((0.0 if b is None else b) - mean) + (0.0 if beta is None else beta)
    return factor, offset


def own_biases(weight: Node) -> None:
    """Give each op that reads a quantized weight a float bias that no op before it reads.

    XNNPACK (executorch 1.5.1) quantizes a bias once, with the input scale of the first op that reads it: 1 dB on a
    layer that is called twice.
    """
    for head in list(weight.users):
        rule = HEADS.get(op_name(head))
        if rule is None or rule.bias is None or argument(head, rule.weight) is not weight:
            continue
        bias, model = argument(head, rule.bias), head.graph.owning_module
        if model is None or not isinstance(bias, Node) or bias.op != "get_attr":
            continue
        if (value := constant_tensor(model, bias)) is None:
            continue
        mentions = head.graph.find_nodes(op="get_attr", target=bias.target)
        if any(reader < head for mention in mentions for reader in mention.users):
            head.replace_input_with(bias, _attribute(model, head, "_own_bias_", value.clone()))


def _drop_counter(norm: Node) -> None:
    """Erase what counts the batches that a batch norm has seen in training: nothing reads it any more."""
    mean = argument(norm, "running_mean")
    owner = str(mean.target).rpartition(".")[0] if isinstance(mean, Node) else ""
    for counter in norm.graph.find_nodes(op="get_attr", target=f"{owner}.num_batches_tracked"):
        if all(op_name(user) == "add" and not user.users for user in counter.users):
            for user in list(counter.users):
                norm.graph.erase_node(user)
            norm.graph.erase_node(counter)


def _attribute(model: GraphModule, head: Node, prefix: str, value: Tensor) -> Node:
    """Register a tensor and return the node, before the head, that reads it."""
    with head.graph.inserting_before(head):
        node = create_getattr_from_value(model, head.graph, prefix, value.detach(), value.device)
    mode = getattr(value_of(head), "fake_mode", None)
    node.meta["val"] = mode.from_tensor(value, static_shapes=True) if mode is not None else value
    return node
