"""The real flow in one call (export, prepare, calibrate, convert), and what is read off a converted graph."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs.base import ActivationConfig, BackendConfig
from quantmark.observers.qparams import INT8_AFFINE, Scheme

Inputs = tuple[Any, ...]

_LIB = torch.ops.quantized_decomposed
QUANTIZE = {_LIB.quantize_per_tensor.default, _LIB.quantize_per_channel.default}
DEQUANTIZE = {_LIB.dequantize_per_tensor.default, _LIB.dequantize_per_channel.default}


def minmax_config(scheme: Scheme = INT8_AFFINE, **fields: Any) -> BackendConfig:
    """A backend that runs every op, with the cheapest estimator."""
    return BackendConfig(activation=ActivationConfig(scheme=scheme, estimator="minmax"), **fields)


def export(
    model: nn.Module, inputs: Inputs, *, strict: bool = False, guards: bool = True, dynamic: Any = None
) -> GraphModule:
    """Export as a user does."""
    exported = torch.export.export(model, inputs, strict=strict, dynamic_shapes=dynamic)
    module = exported.module() if guards else exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


@dataclass
class Flow:
    """What came out of the three calls."""

    quantizer: Quantizer
    prepared: GraphModule
    converted: GraphModule


def quantize(
    model: nn.Module,
    inputs: Inputs,
    quantizer: Quantizer | BackendConfig,
    *,
    batches: Sequence[Inputs] | None = None,
    qat: bool = False,
    train: Callable[[GraphModule], None] | None = None,
    keep: bool = False,
    **how: Any,
) -> Flow:
    """Export (unless `model` is a graph already), prepare, calibrate on `batches` (default: `inputs`), convert.

    `keep` keeps the prepared model as it was before `convert_pt2e` took it apart.
    """
    graph = copy.deepcopy(model) if isinstance(model, GraphModule) else export(model, inputs, **how)
    if isinstance(quantizer, BackendConfig):
        quantizer = BackendQuantizer(quantizer)
    prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, quantizer)
    if train is not None:
        train(prepared)
    with torch.no_grad():
        for batch in [inputs] if batches is None else batches:
            prepared(*batch)
    kept = copy.deepcopy(prepared) if keep else prepared
    return Flow(quantizer, kept, convert_pt2e(prepared))


def sqnr_db(reference: Tensor, actual: Tensor) -> float:
    """Signal to quantization noise ratio in dB; inf where both are equal."""
    reference, actual = reference.detach().double(), actual.detach().double()
    noise = (reference - actual).square().sum().item()
    signal = reference.square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


@dataclass(frozen=True)
class Pair:
    """The qparams of one per-tensor quantize/dequantize pair."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @property
    def largest(self) -> float:
        return self.scale * (self.quant_max - self.zero_point)

    @property
    def smallest(self) -> float:
        return self.scale * (self.quant_min - self.zero_point)


def is_quantize(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target in QUANTIZE


def is_dequantize(node: Any) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target in DEQUANTIZE


def pair_of(node: Node) -> Pair:
    """The qparams of a per-tensor quantize or dequantize node."""
    scale, zero_point, quant_min, quant_max, dtype = node.args[1:6]
    return Pair(scale, zero_point, quant_min, quant_max, dtype)  # type: ignore[arg-type]


def quantized_value(node: Any) -> Node:
    """The node whose value a dequantize node was made from."""
    assert is_dequantize(node), f"{node} is no dequantize"
    source = node.args[0]
    assert isinstance(source, Node)
    assert is_quantize(source), f"{source} is no quantize"
    value = source.args[0]
    assert isinstance(value, Node)
    return value


def calls(graph: GraphModule, *names: str) -> list[Node]:
    """The nodes that call one of the aten ops, by name with its underscore."""
    return [n for n in graph.graph.nodes if str(n.target).startswith(tuple(f"aten.{name}." for name in names))]


def constant(node: Any) -> Tensor:
    """The tensor that a get_attr node reads."""
    assert isinstance(node, Node)
    assert node.op == "get_attr"
    owner = node.graph.owning_module
    assert owner is not None
    found = operator.attrgetter(str(node.target))(owner)
    assert isinstance(found, Tensor)
    return found


def outputs(graph: GraphModule) -> list[Any]:
    """What the graph returns, as nodes."""
    (node,) = graph.graph.find_nodes(op="output")
    found = node.args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def observers(prepared: GraphModule) -> list[Node]:
    return [n for n in prepared.graph.nodes if n.op == "call_module" and "activation_post_process" in str(n.target)]


def observed(prepared: GraphModule) -> Iterator[Node]:
    """The nodes whose values are observed."""
    for node in observers(prepared):
        value = node.args[0]
        while isinstance(value, Node) and value in observers(prepared):
            value = value.args[0]
        assert isinstance(value, Node)
        yield value
