"""The activation contract: found where it is broken, at both ends, by any reader of the output."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from quantmark import UnsafeModelError, configs
from quantmark.checks import Severity, check
from quantmark.configs.base import BlockRules
from support.flow import minmax_config, quantize
from support.planting import quantize_after, set_qparams, the

X = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 4,)
GENERIC = minmax_config()
CLAMPS = {"relu": nn.ReLU(), "hardtanh": nn.ReLU6(), "two": nn.Hardtanh(-1.0, 2.0)}


@cache
def _converted(activation: str) -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), CLAMPS[activation]).eval()
    return quantize(model, X, GENERIC).converted


def planted(activation: str, **fields: Any) -> GraphModule:
    graph = copy.deepcopy(_converted(activation))
    set_qparams(quantize_after(the(graph, "hardtanh" if activation == "two" else activation)), **fields)
    return graph


@pytest.mark.parametrize("activation", CLAMPS)
@pytest.mark.parametrize("config", [GENERIC, None, configs.xnnpack()])
def test_a_kept_contract_is_no_finding(activation: str, config: configs.BackendConfig | None) -> None:
    assert check(_converted(activation), config).findings == ()


@pytest.mark.parametrize(
    ("activation", "fields", "codes"),
    [
        ("relu", {"zero_point": -127}, ["QM201"]),
        ("relu", {"zero_point": 0}, ["QM201"]),
        ("hardtanh", {"zero_point": -18, "scale": 6 / 145}, ["QM201"]),
        ("hardtanh", {"scale": 6.1 / 255}, ["QM202"]),
        ("hardtanh", {"zero_point": 0, "scale": 0.1}, ["QM201", "QM202"]),
        ("two", {"scale": 3.2 / 255}, ["QM201", "QM202"]),
        ("two", {"zero_point": -28}, ["QM201"]),
        ("two", {"zero_point": -58}, ["QM202"]),
    ],
)
def test_a_broken_contract(activation: str, fields: dict[str, Any], codes: list[str]) -> None:
    report = check(planted(activation, **fields), GENERIC)
    assert [f.code for f in report.findings] == codes
    assert {f.severity for f in report.findings} == {Severity.ERROR}
    with pytest.raises(UnsafeModelError, match=codes[0]):
        report.raise_if_unsafe()


def test_half_a_step_above_the_bound_is_none() -> None:
    step = 6 / 254.6
    assert check(planted("hardtanh", scale=step), GENERIC).findings == ()
    assert check(planted("hardtanh", scale=6 / 254.4), GENERIC).codes() == ["QM202"]


def test_the_numbers_say_what_can_be_written() -> None:
    (found,) = check(planted("relu", zero_point=-18, scale=0.02)).findings
    assert found.numbers == {
        "scale": 0.02,
        "zero_point": -18.0,
        "quant_min": -128.0,
        "bound": 0.0,
        "smallest": pytest.approx(-2.2),
    }
    assert "values down to -2.2" in found.message


def test_a_backend_that_keeps_the_bounds_is_only_told() -> None:
    report = check(planted("relu", zero_point=0), configs.xnnpack())
    assert [(f.code, f.severity) for f in report.findings] == [("QM201", Severity.INFO)]
    assert report.raise_if_unsafe() is report


def test_a_residual_activation_is_only_assumed_without_a_config() -> None:
    class Residual(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.relu(x + x.abs())

    graph = quantize(Residual(), X, GENERIC).converted
    set_qparams(quantize_after(the(graph, "relu")), zero_point=0)
    assert [f.severity for f in check(graph, GENERIC).findings] == [Severity.ERROR]
    assert [f.severity for f in check(graph).findings] == [Severity.WARNING]


def test_no_contract_where_the_clamp_stands_alone() -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.relu(x).neg()

    graph = quantize(Alone(), X, GENERIC).converted
    set_qparams(quantize_after(the(graph, "relu")), zero_point=0)
    assert check(graph, GENERIC).findings == ()


@pytest.mark.parametrize("config", [GENERIC, None, configs.xnnpack()])
def test_an_erased_activation_is_remembered(config: configs.BackendConfig | None) -> None:
    """Conversion leaves nothing but the output's codes of it: also on the program exported again."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6()).eval()
    graph = quantize(model, X, minmax_config(blocks=BlockRules(erase_activations=True))).converted
    assert check(graph, config).findings == ()
    conv = the(graph, "conv2d")
    set_qparams(quantize_after(conv), zero_point=0, scale=0.1)
    for form in (graph, torch.export.export(graph, X)):
        found = check(form, config).findings
        assert [(f.code, f.node, f.severity) for f in found] == [
            ("QM201", "conv2d", Severity.ERROR),
            ("QM202", "conv2d", Severity.ERROR),
        ]
