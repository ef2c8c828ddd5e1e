"""Weights whose channels run where no kernel can scale them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from quantmark import configs
from quantmark.checks import Severity, check
from quantmark.configs import WeightConfig
from quantmark.observers.qparams import INT8_AFFINE
from support.flow import calls, constant, minmax_config, quantize

GENERIC = minmax_config()
XNNPACK = configs.xnnpack(estimator="minmax")
G = torch.Generator().manual_seed(0)
IMAGE = (torch.randn(1, 4, 6, 6, generator=G),)
HEADS: dict[str, tuple[nn.Module, tuple[torch.Tensor]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3), (torch.randn(1, 4, 6, generator=G),)),
    "conv2d": (nn.Conv2d(4, 6, 3), IMAGE),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3), IMAGE),
    "grouped_transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2), IMAGE),
    "linear": (nn.Linear(4, 6), (torch.randn(2, 4, generator=G),)),
}


def found(model: object, config: configs.BackendConfig | None = GENERIC) -> list[tuple[str, Severity]]:
    return [(f.code, f.severity) for f in check(model, config).findings if f.code[2] == "9"]


def converted(name: str, config: configs.BackendConfig = GENERIC) -> GraphModule:
    module, x = HEADS[name]
    return quantize(nn.Sequential(copy.deepcopy(module)).eval(), x, config).converted


def weight_of(graph: GraphModule) -> Node:
    (head,) = calls(graph, "conv1d", "conv2d", "conv_transpose2d", "linear")
    weight = head.args[1]
    assert isinstance(weight, Node)
    return weight


@pytest.mark.parametrize("name", HEADS)
def test_the_axis_of_output_channels(name: str) -> None:
    graph = converted(name)
    assert check(graph, GENERIC).findings == ()
    weight = weight_of(graph)
    args = list(weight.args)
    args[3] = 1 - args[3]  # type: ignore[operator]
    weight.args = tuple(args)
    assert found(graph) == [("QM901", Severity.ERROR)]


@pytest.mark.parametrize("name", ["linear", "conv_transpose2d"])
def test_the_axis_is_followed_through_what_lowering_makes_of_it(name: str) -> None:
    from executorch.exir import to_edge

    graph = converted(name)
    _, x = HEADS[name]
    assert check(to_edge(torch.export.export(graph, x)), GENERIC).findings == ()
    weight = weight_of(graph)
    args = list(weight.args)
    args[3] = 1 - args[3]  # type: ignore[operator]
    weight.args = tuple(args)
    constant(args[1]).resize_(max(weight_shape(graph))).fill_(0.1)
    constant(args[2]).resize_(max(weight_shape(graph))).fill_(0)
    graph.recompile()
    exported = torch.export.export(graph, x)
    assert found(exported) == [("QM901", Severity.ERROR)]
    assert found(to_edge(exported)) == [("QM901", Severity.ERROR)]


def weight_shape(graph: GraphModule) -> tuple[int, ...]:
    return tuple(constant(weight_of(graph).args[0]).shape)


def test_too_few_scales() -> None:
    graph = converted("conv2d")
    scales = constant(weight_of(graph).args[1])
    scales.resize_(scales.numel() - 1)
    assert found(graph) == [("QM902", Severity.ERROR)]


def test_a_zero_point_where_weights_are_symmetric() -> None:
    graph = converted("conv2d")
    constant(weight_of(graph).args[2])[1] = 3
    assert found(graph) == [("QM903", Severity.ERROR)]
    assert found(graph, None) == []
    affine = minmax_config(weight=WeightConfig(scheme=INT8_AFFINE, allow_affine=True, per_channel=False))
    assert check(converted("linear", affine), affine).findings == ()


def test_channels_where_the_backend_takes_one_scale() -> None:
    assert found(converted("grouped_transposed"), XNNPACK) == [("QM904", Severity.ERROR)]
    assert found(converted("grouped_transposed", XNNPACK), XNNPACK) == []
    assert found(converted("conv_transpose2d"), XNNPACK) == []
