"""Qparams that no data can have led to, planted one by one."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import quantmark
from quantmark import configs
from quantmark.checks import Severity, check
from support.flow import calls, constant, minmax_config, quantize
from support.planting import quantize_after, set_qparams, the

X = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
GENERIC = minmax_config()
FLOAT32_EPS = torch.finfo(torch.float32).eps


@cache
def _converted() -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    return quantize(model, X, GENERIC).converted


@pytest.fixture
def graph() -> GraphModule:
    return copy.deepcopy(_converted())


def relu_out(graph: GraphModule) -> Node:
    return quantize_after(the(graph, "relu"))


def weight_pair(graph: GraphModule, index: int = 0) -> Node:
    found = calls(graph, "conv2d")[index].args[1]
    assert isinstance(found, Node)
    return found


@pytest.mark.parametrize(
    ("fields", "code", "severity"),
    [
        ({"scale": 1.0, "zero_point": 0}, "QM301", Severity.ERROR),
        (
            {"scale": 1.0, "zero_point": 0, "quant_min": 0, "quant_max": 255, "dtype": torch.uint8},
            "QM301",
            Severity.WARNING,
        ),
        ({"scale": math.nan}, "QM302", Severity.ERROR),
        ({"scale": math.inf}, "QM302", Severity.ERROR),
        ({"scale": 0.0}, "QM302", Severity.ERROR),
        ({"scale": -0.1}, "QM302", Severity.ERROR),
        ({"scale": 1e-39}, "QM302", Severity.ERROR),
        ({"zero_point": 200}, "QM302", Severity.ERROR),
        ({"scale": 2.0**-12}, "QM303", Severity.WARNING),
        ({"scale": FLOAT32_EPS}, "QM303", Severity.WARNING),
        ({"scale": 1.3e36}, "QM307", Severity.WARNING),
        ({"zero_point": 127}, "QM304", Severity.ERROR),
    ],
)
def test_an_activation(graph: GraphModule, fields: dict[str, Any], code: str, severity: Severity) -> None:
    set_qparams(relu_out(graph), **fields)
    found = [f for f in check(graph, GENERIC).findings if f.code.startswith("QM3")]
    assert [(f.code, f.node, f.severity) for f in found] == [(code, "relu", severity)]


def test_an_observer_that_never_ran() -> None:
    """The real thing: a quantizer with torchao's own observers, and no calibration."""

    class Plain(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            spec = QuantizationSpec(
                dtype=torch.int8,
                quant_min=-128,
                quant_max=127,
                qscheme=torch.per_tensor_affine,
                observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
            )
            for node in calls(model, "relu"):
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: spec},  # type: ignore[dict-item]
                    output_qspec=spec,
                    _annotated=True,
                )
            return model

        def validate(self, model: GraphModule) -> None: ...

    graph = quantize(nn.Sequential(nn.ReLU()), X, Plain(), batches=[]).converted
    assert [(f.code, f.node) for f in check(graph).findings] == [("QM301", "input_1"), ("QM301", "relu")]
    graph = quantize(nn.Sequential(nn.ReLU()), (torch.zeros(2),), Plain()).converted
    assert {f.code for f in check(graph).findings} == {"QM303"}
    graph = quantize(nn.Sequential(nn.ReLU()), X, Plain()).converted
    assert check(graph).findings == ()


def test_a_dequantize_that_disagrees(graph: GraphModule) -> None:
    set_qparams(relu_out(graph), pairs=False, scale=0.123)
    (found,) = check(graph, GENERIC).findings
    assert (found.code, found.severity, found.numbers["scale"]) == ("QM305", Severity.ERROR, 0.123)


def test_weight_channels_at_the_floor(graph: GraphModule) -> None:
    """After folding a batch norm, scales of 1e-6 are normal; an eps of 2**-12 leaves a handful of codes."""
    dequantize = weight_pair(graph, 1)
    scales, codes = constant(dequantize.args[1]), constant(dequantize.args[0])
    scales[:3] = 2.0**-12
    codes[0] = 0
    codes[1] = codes[1].clamp(-2, 2)
    codes[1, 0] = 2
    (found,) = check(graph, GENERIC).findings
    assert (found.code, found.node, found.severity) == ("QM306", "conv2d_1", Severity.WARNING)
    assert found.numbers["channels"] == 2.0  # the third uses its codes
    assert found.numbers["dead"] == 1.0
    assert found.numbers["loss_db"] == pytest.approx(20 * math.log10(127 / 2))
    codes[1] = 0  # which may be what the weights are
    (found,) = check(graph, GENERIC).findings
    assert (found.severity, found.numbers["dead"]) == (Severity.INFO, 2.0)


def test_a_weight_scale_that_can_not_be(graph: GraphModule) -> None:
    constant(weight_pair(graph).args[1])[0] = math.inf
    assert [(f.code, f.node) for f in check(graph, GENERIC).findings] == [("QM302", "conv2d")]


def test_a_dead_channel_that_was_left_alone_is_no_finding() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        conv.weight[1] = 0.0
    model = nn.Sequential(conv, nn.ReLU()).eval()
    assert check(quantize(model, X, GENERIC).converted, GENERIC).findings == ()


ZERO: dict[str, Any] = {
    "a relu cut at 0": lambda x: x.relu().clamp(max=0.0) + x,
    "a clamp to one value": lambda x: x.clamp(0.0, 0.0) + x,
    "what is never negative cut at 0": lambda x: x.abs().clamp(max=0.0) + x,
    "clamps in a row": lambda x: torch.nn.functional.hardtanh(x, 0.0, 6.0).clamp(max=0.0) + x,
    "zeros that share with another": lambda x: torch.cat([x.abs().clamp(max=0.0), x.relu()], 1).neg() * 2.0,
}


@pytest.mark.parametrize("kind", ZERO)
@pytest.mark.parametrize("config", [configs.xnnpack(), configs.cadence(), GENERIC], ids=lambda config: config.name)
def test_what_writes_0_alone_needs_no_more_than_one_code(kind: str, config: configs.BackendConfig) -> None:
    class Zero(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return ZERO[kind](x)

    result = quantmark.quantize(Zero(), [X[0]], config, progress=False)
    assert set(result.report.codes()) <= {"QM311", "QM312", "QM501", "QM603"}  # dead, which it is
    assert "QM304" not in check(result.model, config).codes()


def test_a_clamp_whose_codes_hold_none_of_its_values() -> None:
    """Bounded above by 0 and shared with a tensor that is never negative: all of it is lost."""

    class Lost(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.clamp(max=0.0) + 1.0

    graph = quantize(Lost(), X, GENERIC).converted
    set_qparams(quantize_after(the(graph, "clamp")), zero_point=-128)
    found = [f for f in check(graph, GENERIC).findings if f.code == "QM304"]
    assert [(f.node, f.severity) for f in found] == [("clamp", Severity.ERROR)]
