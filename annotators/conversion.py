"""What becomes of an observer in `convert_pt2e`: a quantize/dequantize pair, or nothing.

torchao calls an observer's own `convert(model, node)` where it has one. Ours writes the pair that the plan decided,
and leaves out a pair that would do nothing: the cell stays float, or the value was just dequantized with the very
same qparams. So a value is quantized once, and a decision made late costs no node.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import torch
from torch.fx import Node
from torch.fx.traceback import NodeSource, NodeSourceAction
from torchao.quantization.pt2e.fake_quantize import FakeQuantize
from torchao.quantization.pt2e.utils import create_getattr_from_value

from ..observers.observer import PerChannelBiasObserver, PerChannelRangeObserver, RangeObserver
from ..observers.qparams import QParams
from .folding import fold_batch_norms, own_biases
from .graph import constant_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule
    from torch.fx.node import Argument

    from ..observers.estimators import Estimator
    from ..observers.observer import Component
    from ..observers.resolution import Assignment
    from .draft import Bias

_LIB = torch.ops.quantized_decomposed
FOLDED: Final = "quantmark_folded"
"""Key in `node.meta` of an activation that its block's saturation stands for: the bounds of the block's output."""
ERASED: Final = "quantmark_erased"
"""Key in `node.meta["custom"]`, which export keeps, of an op whose activation was erased: its name and its bounds."""


def replace_with_pairs(node: Node, assignment: Assignment) -> None:
    """Replace an observer node by the quantize/dequantize pairs that its cell was assigned."""
    value = cast("Node", node.args[0])
    if assignment.qparams is None:
        for neighbour in (value, *node.users):
            _unmark(neighbour)
    else:
        value = _without_activation(node, value, assignment.qparams)
        if assignment.through is not None and _comes_from(value, assignment.through):
            value = _pair(node, value, assignment.through)
        value = _pair(node, value, assignment.qparams)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    own_biases(value)


def _without_activation(node: Node, value: Node, qparams: QParams) -> Node:
    """Return what the observer node reads once the activation that saturation stands for is erased."""
    bounds = value.meta.get(FOLDED)
    if bounds is None:
        return value
    if not qparams.honours(bounds):
        return _with_activation(value, qparams) if len(value.users) == 1 else value
    last = value.name
    while FOLDED in value.meta and len(value.users) == 1:
        folded, value = value, cast("Node", value.args[0])
        node.replace_input_with(folded, value)
        node.graph.erase_node(folded)
    if value.name != last:
        erased = {"name": last, "lower": bounds.lower, "upper": bounds.upper}
        value.meta["custom"] = {**value.meta.get("custom", {}), ERASED: erased}
    return value


def _with_activation(value: Node, qparams: QParams) -> Node:
    """Make activations ops of their own, with the same qparams on both sides, where saturation can't stand for them."""
    node = value
    while FOLDED in node.meta:
        source = cast("Node", node.args[0])
        node.replace_input_with(source, _pair(node, source, qparams))
        del node.meta[FOLDED]
        node = source
    return value


def _comes_from(value: Node, wide: QParams) -> bool:
    """Tell whether the value was just cut from a tensor with the wide root's qparams (further down it is narrow)."""
    while value.target is operator.getitem:
        value = cast("Node", value.args[0])
    source = value.args[0] if value.args else None
    return any(isinstance(each, Node) and _encodes(each, wide) for each in (value, source))


def _encodes(node: Node, qparams: QParams) -> bool:
    return node.target is _LIB.dequantize_per_tensor.default and node.args[1:6] == _arguments(qparams)


def _arguments(qparams: QParams) -> tuple[float, int, int, int, torch.dtype]:
    scheme = qparams.scheme
    return (qparams.scale, qparams.zero_point, scheme.quant_min, scheme.quant_max, scheme.dtype)


def _unmark(node: Node) -> None:
    """Take back the mark by which a partitioner knows a quantized op: a tensor beside it was left float."""
    custom = node.meta.get("custom")
    if custom and {"quantized": True} in custom.values():
        node.meta["custom"] = {key: value for key, value in custom.items() if value != {"quantized": True}}


def _pair(node: Node, value: Node, qparams: QParams) -> Node:
    scheme, args = qparams.scheme, _arguments(qparams)
    if _encodes(value, qparams):
        return value
    for twin in value.users:  # the same value was quantized just so for another reader
        if twin.target is _LIB.quantize_per_tensor.default and twin.args == (value, *args):
            return next(iter(twin.users))
    graph = node.graph
    with graph.inserting_before(node):
        quantized = graph.call_function(_LIB.quantize_per_tensor.default, (value, *args))
        dequantized = graph.call_function(_LIB.dequantize_per_tensor.default, (quantized, *args), _out_dtype(value))
    _describe(node, value, quantized, dequantized, scheme.dtype)
    return dequantized


def replace_with_channel_pair(
    model: GraphModule,
    node: Node,
    observer: PerChannelRangeObserver | PerChannelBiasObserver,
    qparams: tuple[Tensor, Tensor],
) -> None:
    """Replace the observer node of a weight by a per-channel quantize/dequantize pair."""
    dequantized = _channel_pair(model, cast("Node", node.args[0]), node, observer, qparams)
    node.replace_all_uses_with(dequantized)
    node.graph.erase_node(node)
    own_biases(dequantized)
    if isinstance(observer, PerChannelRangeObserver):
        fold_batch_norms(
            model,
            dequantized,
            observer,
            lambda weight, place, scale, zero: _channel_pair(model, weight, place, observer, (scale, zero)),
        )


def _channel_pair(
    model: GraphModule,
    value: Node,
    place: Node,
    observer: PerChannelRangeObserver | PerChannelBiasObserver,
    qparams: tuple[Tensor, Tensor],
) -> Node:
    """Write a per-channel pair for a value before a place, unless there is one; return what it dequantizes to."""
    graph = place.graph
    codes = (observer.ch_axis, observer.quant_min, observer.quant_max, observer.dtype)
    for twin in value.users:  # a layer called twice: the weight was quantized just so for another call
        if twin.target is _LIB.quantize_per_channel.default and twin.args[3:] == codes:
            known = (constant_tensor(model, cast("Node", each)) for each in twin.args[1:3])
            if all(a is not None and torch.equal(a, b) for a, b in zip(known, qparams, strict=True)):
                return next(iter(twin.users))
    with graph.inserting_before(place):
        names = [
            create_getattr_from_value(model, graph, f"_{suffix}", tensor, tensor.device)
            for suffix, tensor in zip(("scale", "zero_point"), qparams, strict=True)
        ]
        args = (*names, *codes)
        quantized = graph.call_function(_LIB.quantize_per_channel.default, (value, *args))
        dequantized = graph.call_function(_LIB.dequantize_per_channel.default, (quantized, *args), _out_dtype(value))
    _describe(place, value, quantized, dequantized, observer.dtype)
    return dequantized


def _out_dtype(value: Node) -> dict[str, Argument]:
    """Return what keeps a half-precision model's dtype at the border (the ops' default is float32)."""
    dtype = getattr(value.meta.get("val"), "dtype", torch.float32)
    return {} if dtype == torch.float32 else {"out_dtype": dtype}


def _describe(place: Node, value: Node, quantized: Node, dequantized: Node, dtype: torch.dtype) -> None:
    """Record where a pair comes from and what it yields, as export does for its nodes."""
    fake = value.meta.get("val")
    for node, result in ((quantized, dtype), (dequantized, None)):
        node.meta["from_node"] = [NodeSource(place, "quantmark", [NodeSourceAction.CREATE])]
        for key in ("nn_module_stack", "stack_trace"):
            if key in place.meta:
                node.meta[key] = place.meta[key]
        if isinstance(fake, torch.Tensor):
            node.meta["val"] = fake.to(result) if result is not None else fake


class PlannedObserver(RangeObserver):
    """A `RangeObserver` that writes what its plan decided."""

    @classmethod
    def planned(
        cls, component: Component, cell: str, estimator: Estimator, preset: Estimator | None, **kwargs: object
    ) -> PlannedObserver:
        """Make the observer of a cell; `kwargs` are the spec's fields."""
        return cls(component=component, cell=cell, estimator=estimator, preset=preset, **kwargs)  # type: ignore[arg-type]

    def convert(self, model: GraphModule, observer_node: Node) -> None:  # noqa: ARG002  (torchao's signature)
        """Replace the observer node in the graph (called by `convert_pt2e`)."""
        replace_with_pairs(observer_node, self.assignment())


class PlannedPerChannelObserver(PerChannelRangeObserver):
    """A `PerChannelRangeObserver` that writes what its plan decided."""

    @classmethod
    def planned(
        cls, component: Component, cell: str, channels: int, *, search: bool, **kwargs: object
    ) -> PlannedPerChannelObserver:
        """Make the observer of a weight; `kwargs` are the spec's fields."""
        return cls(component=component, cell=cell, channels=channels, search=search, **kwargs)  # type: ignore[arg-type]

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace the observer node in the graph (called by `convert_pt2e`)."""
        if self.assignment().qparams is None:
            replace_with_pairs(observer_node, self.assignment())
        else:
            replace_with_channel_pair(model, observer_node, self, self.calculate_qparams())


class PlannedPerChannelBias(PerChannelBiasObserver):
    """A `PerChannelBiasObserver` that writes what its plan decided."""

    @classmethod
    def planned(cls, component: Component, cell: str, bias: Bias, **kwargs: object) -> PlannedPerChannelBias:
        """Make the observer of a bias; `kwargs` are the spec's fields."""
        return cls(
            component=component,
            cell=cell,
            input_cell=bias.input,
            weight_cell=bias.weight,
            channels=bias.channels,
            **kwargs,  # type: ignore[arg-type]
        )

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace the observer node in the graph (called by `convert_pt2e`)."""
        assignment = self.assignment()
        if assignment.qparams is not None and self.channels is not None:
            replace_with_channel_pair(model, observer_node, self, self.calculate_qparams())
        elif assignment.qparams is not None:
            scale = float(self.calculate_qparams()[0])
            replace_with_pairs(observer_node, replace(assignment, qparams=QParams(scale, 0, self.scheme)))
        else:
            replace_with_pairs(observer_node, assignment)


class PlannedFakeQuantize(FakeQuantize):
    """torchao's `FakeQuantize` around a `RangeObserver`, for quantization-aware training."""

    activation_post_process: RangeObserver

    @classmethod
    def planned(
        cls, component: Component, cell: str, estimator: Estimator, preset: Estimator | None, **kwargs: object
    ) -> PlannedFakeQuantize:
        """Make the fake-quantize of a cell; `kwargs` are the spec's fields."""

        def observer(**fields: object) -> PlannedObserver:
            return PlannedObserver.planned(component, cell, estimator, preset, **fields)

        return cls(observer=observer, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Observe, then round as the plan decided so far; a cell that is float or saw nothing passes through."""
        if self.observer_enabled[0] == 1:
            self.activation_post_process(x.detach())
        if self.activation_post_process.known_range() is None:
            return x
        assignment = self.activation_post_process.assignment()
        if assignment.qparams is None:
            return x
        self.scale.fill_(assignment.qparams.scale)
        self.zero_point.fill_(assignment.qparams.zero_point)
        if self.fake_quant_enabled[0] == 1:
            for q in filter(None, (assignment.through, assignment.qparams)):
                x = torch.fake_quantize_per_tensor_affine(
                    x, q.scale, q.zero_point, q.scheme.quant_min, q.scheme.quant_max
                )
        return x

    def convert(self, model: GraphModule, observer_node: Node) -> None:  # noqa: ARG002  (torchao's signature)
        """Replace the fake-quantize node in the graph (called by `convert_pt2e`)."""
        replace_with_pairs(observer_node, self.activation_post_process.assignment())


class PlannedPerChannelFakeQuantize(FakeQuantize):
    """torchao's `FakeQuantize` around a `PerChannelRangeObserver`, for the weights in training."""

    activation_post_process: PerChannelRangeObserver

    @classmethod
    def planned(
        cls,
        component: Component,
        cell: str,
        channels: int,
        *,
        search: bool,  # noqa: ARG003  (a weight in training moves at every step: its exact range is used)
        **kwargs: object,
    ) -> PlannedPerChannelFakeQuantize:
        """Make the fake-quantize of a weight; `kwargs` are the spec's fields."""

        def observer(**fields: object) -> PerChannelRangeObserver:
            return PerChannelRangeObserver(component=component, cell=cell, channels=channels, once=False, **fields)  # type: ignore[arg-type]

        return cls(observer=observer, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Observe, then round; the weight of an op that is left float passes through, as it will once converted."""
        observer = self.activation_post_process
        if observer.known_range() is not None and observer.assignment().qparams is None:
            if self.observer_enabled[0] == 1:
                observer(x.detach())
            return x
        rounded: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return rounded

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace the fake-quantize node in the graph (called by `convert_pt2e`)."""
        observer = self.activation_post_process
        if observer.assignment().qparams is None:
            replace_with_pairs(observer_node, observer.assignment())
        else:
            replace_with_channel_pair(model, observer_node, observer, observer.calculate_qparams())
