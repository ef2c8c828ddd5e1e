"""What XNNPACK's runtime refuses or computes wrongly, as measured on it (see configs/xnnpack.py)."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import quantmark
from quantmark import configs
from quantmark.checks import Severity, check
from support.flow import constant, minmax_config, pair_of, quantize
from support.planting import bypass, quantize_after, set_qparams, the

X = (torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)),)
XNNPACK = configs.xnnpack(estimator="minmax")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.b(torch.relu(self.a(x))))


@cache
def _converted() -> GraphModule:
    return quantize(Net().eval(), X, XNNPACK).converted


@pytest.fixture
def graph() -> GraphModule:
    return copy.deepcopy(_converted())


def found(model: Any, config: configs.BackendConfig | None = XNNPACK) -> list[tuple[str, str, Severity]]:
    return [(f.code, f.node, f.severity) for f in check(model, config).findings if f.code[2] == "8"]


def test_within_limits(graph: GraphModule) -> None:
    assert check(graph, XNNPACK).findings == ()


def test_a_ratio_that_does_not_load(graph: GraphModule) -> None:
    conv = the(graph, "conv2d", 1)
    weight = conv.args[1]
    assert isinstance(weight, Node)
    source = pair_of(conv.args[0])  # type: ignore[arg-type]
    product = source.scale * float(constant(weight.args[1]).max())
    set_qparams(quantize_after(the(graph, "relu", 1)), scale=product / 255)
    assert found(graph) == []
    set_qparams(quantize_after(the(graph, "relu", 1)), scale=product / 256)
    assert found(graph) == [("QM801", "relu_1", Severity.ERROR)]
    assert found(graph, None) == []


def test_a_bias_that_overflows(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    weight, bias = conv.args[1:3]
    assert isinstance(weight, Node)
    step = pair_of(conv.args[0]).scale * float(constant(weight.args[1])[2])  # type: ignore[arg-type]
    with torch.no_grad():
        constant(bias)[2] = 2.0**30.9 * step
    assert found(graph) == []
    with torch.no_grad():
        constant(bias)[2] = -(2.0**31.1) * step
    assert found(graph) == [("QM802", "conv2d", Severity.ERROR)]
    (finding,) = check(graph, XNNPACK).findings
    assert finding.numbers == {"channels": 1.0, "bits_needed": pytest.approx(32.1, abs=0.01)}


def test_a_bias_that_two_ops_read_with_other_scales(graph: GraphModule) -> None:
    """On the runtime the second call adds the bias in units of the first (1.2 dB instead of 47.9)."""
    first, second = the(graph, "conv2d").args[2], the(graph, "conv2d", 1).args[2]
    assert isinstance(first, Node)
    assert isinstance(second, Node)
    second.target = first.target
    assert found(graph) == [("QM806", "conv2d_1", Severity.ERROR)]
    with torch.no_grad():
        constant(first).zero_()
    assert found(graph) == []


def test_a_quantized_weight_with_a_float_output(graph: GraphModule) -> None:
    bypass(quantize_after(the(graph, "relu", 1)))
    assert found(graph) == [("QM803", "conv2d_1", Severity.ERROR)]
    assert found(graph, minmax_config()) == []


def test_a_quantized_weight_with_a_float_input(graph: GraphModule) -> None:
    bypass(the(graph, "conv2d").args[0].args[0])  # type: ignore[union-attr, arg-type]
    assert found(graph) == [("QM803", "conv2d", Severity.ERROR)]


def test_a_second_reader(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    with graph.graph.inserting_after(conv):
        graph.graph.call_function(torch.ops.aten.abs.default, (conv,))
    assert found(graph) == [("QM803", "conv2d", Severity.ERROR)]


def test_an_activation_that_is_not_fused_between_head_and_quantize(graph: GraphModule) -> None:
    relu = the(graph, "relu")
    relu.target, relu.args = torch.ops.aten.clamp.default, (*relu.args, 0.0)
    assert found(graph) == [("QM803", "conv2d", Severity.ERROR)]


def test_movement_between_dequantize_and_head(graph: GraphModule) -> None:
    conv = the(graph, "conv2d")
    source = conv.args[0]
    assert isinstance(source, Node)
    with graph.graph.inserting_before(conv):
        moved = graph.graph.call_function(torch.ops.aten.permute.default, (source, [0, 1, 3, 2]))
    conv.replace_input_with(source, moved)
    assert found(graph) == [("QM803", "conv2d", Severity.ERROR)]


def test_a_weight_alone_may_be_quantized(graph: GraphModule) -> None:
    bypass(the(graph, "conv2d").args[0].args[0])  # type: ignore[union-attr, arg-type]
    bypass(quantize_after(the(graph, "relu")))
    bypass(quantize_after(the(graph, "relu", 1)))
    assert found(graph) == []


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y), y.sigmoid(), y.tanh(), y + 1.0, y


def test_one_dequantize_for_quantized_and_float_readers() -> None:
    """Seen on the runtime: conv, add or max_pool with sigmoid, elu or the output fail; each kind by itself runs."""
    converted = quantize(Shared().eval(), X, XNNPACK).converted
    assert found(converted) == []  # convert_pt2e gives annotated readers a dequantize each
    conv, add, sigmoid = the(converted, "conv2d", 1), the(converted, "add"), the(converted, "sigmoid")
    own, others, shared = conv.args[0], sigmoid.args[0], add.args[0]
    assert isinstance(own, Node)
    assert isinstance(others, Node)
    assert isinstance(shared, Node)
    assert len({own, others, shared}) == 3
    add.replace_input_with(shared, own)
    assert found(converted) == []  # two quantized readers
    sigmoid.replace_input_with(others, own)
    assert found(converted) == [("QM805", "conv2d", Severity.ERROR)]
    (finding,) = [f for f in check(converted, XNNPACK).findings if f.code == "QM805"]
    assert finding.numbers == {"readers": 3.0, "float": 1.0}


def test_an_op_without_a_quantized_kernel() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 1)).eval()
    converted = quantize(model, (torch.randn(1, 2, 4, 4, 4),), minmax_config()).converted
    assert found(converted) == [("QM803", "conv3d", Severity.ERROR)]


def test_int16_activations() -> None:
    from quantmark.observers.qparams import INT16_SYMMETRIC

    converted = quantize(Net().eval(), X, minmax_config(INT16_SYMMETRIC)).converted
    assert {code for code, *_ in found(converted)} == {"QM804"}


def test_linear_on_the_edge_is_views_around_a_matmul() -> None:
    from executorch.exir import to_edge

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), (torch.randn(2, 3, 6),)
    converted = quantize(model, x, XNNPACK).converted
    edge = to_edge(torch.export.export(converted, x))
    assert check(edge, XNNPACK).findings == ()
    assert check(edge, XNNPACK).counts["weighted ops"] == 2


def test_a_mean_that_the_config_leaves_float_is_no_quantized_reader() -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: nn.Module = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return y.mean(1, True) + y.exp()

    torch.manual_seed(0)
    result = quantmark.quantize(Averages().eval(), [torch.randn(4, 8)], configs.xnnpack(), progress=False)
    assert "QM805" not in {finding.code for finding in result.report.findings}


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_a_derived_bias_that_does_not_fit_int32_is_an_error(factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).eval()
    with torch.no_grad():
        model.bias.mul_(factor)
    result = quantmark.quantize(model, [torch.randn(4, 8)], configs.cadence(), progress=False)
    assert ("QM802" in {finding.code for finding in result.report.findings}) == (factor > 1.0)


@pytest.mark.parametrize("config", [configs.xnnpack(), configs.cadence()], ids=lambda config: config.name)
def test_a_dead_channel_with_a_large_bias(config: configs.BackendConfig) -> None:
    """Large is fine; beyond 2**31 steps of the op it does not fit, and the mend is one that a user can make."""
    conv = nn.Conv2d(4, 4, 1).eval()
    for bias, codes in ((1e4, []), (1e7, ["QM802"])):
        with torch.no_grad():
            conv.weight[1], conv.bias[1] = 0.0, bias  # type: ignore[index]
        result = quantmark.quantize(conv, [X[0]], config, progress=False)
        findings = [finding for finding in result.report.findings if finding.code == "QM802"]
        assert [finding.code for finding in findings] == codes
        assert all("leave the op float" in finding.mend for finding in findings)
    mended = quantmark.BackendQuantizer(config).set_operator_type(torch.ops.aten.conv2d, None)
    with pytest.warns(quantmark.AnnotationWarning, match="no operator was annotated"):
        assert "QM802" not in quantmark.quantize(conv, [X[0]], mended, progress=False).report.codes()
