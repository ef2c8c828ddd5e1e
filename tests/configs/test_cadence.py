"""Cadence's config: its options, the hoist rule that it finds out, and what its compiler needs of a block."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from quantmark import UnsupportedOptionError, configs
from quantmark.configs.cadence import cadence, installed_hoist_rule
from quantmark.observers.rules import Conflict, HoistRule
from support.flow import calls, constant, is_dequantize, pair_of, quantize, quantized_value, sqnr_db

module = import_module("quantmark.configs.cadence")  # the package's attribute of that name is the function


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("1.4.0", HoistRule.ALWAYS),
        ("1.5.1", HoistRule.ALWAYS),
        ("1.5.1+cpu", HoistRule.ALWAYS),
        ("1.5.2", HoistRule.IDENTICAL),
        ("1.6.0.dev20260101", HoistRule.IDENTICAL),
        ("2.0", HoistRule.IDENTICAL),
    ],
)
def test_the_hoist_rule_follows_the_version(version: str, rule: HoistRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda _: version)
    assert installed_hoist_rule() is rule
    assert cadence().branches.hoist is rule
    assert cadence(hoist=HoistRule.NEVER).branches.hoist is HoistRule.NEVER


def test_without_executorch_the_rule_is_the_careful_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise module.PackageNotFoundError

    monkeypatch.setattr(module, "version", absent)
    assert installed_hoist_rule() is HoistRule.ALWAYS


@pytest.mark.parametrize("options", [{"activation": "sym8"}, {"per_channel": True}, {"activation": "float"}])
def test_options_that_cadence_lacks(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"^cadence"):
        cadence(**options)


def test_options_reach_the_config() -> None:
    config = cadence(conflict=Conflict.UNION, max_sharing_loss_db=1.5, symmetric_weights=True, activation="int16")
    assert config.branches.conflict is Conflict.UNION
    assert config.branches.max_sharing_loss_db == 1.5
    assert config.weight.scheme.symmetric
    assert config.activation.scheme.dtype is torch.int16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(torch.relu(self.conv(x)).amax((2, 3)))
        return found


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("activation", ["int8", "int16"])
def test_blocks_as_the_compiler_fuses_them(activation: Literal["int8", "int16"], symmetric: bool, strict: bool) -> None:
    """int32 bias with scale input * weight, weights per tensor, conv + relu with zero_point == quant_min."""
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    config = configs.cadence(activation=activation, symmetric_weights=symmetric)
    converted = quantize(model, (x,), config, strict=strict).converted
    (conv,), (linear,), (relu,) = calls(converted, "conv2d"), calls(converted, "linear"), calls(converted, "relu")
    assert relu.args[0] is conv, "no quantize inside the block"
    (quantized,) = relu.users
    assert pair_of(quantized).zero_point == pair_of(quantized).quant_min
    for head, is_symmetric in ((conv, True), (linear, symmetric)):
        source, weight, bias = (pair_of(node) for node in head.args[:3])  # type: ignore[arg-type]
        assert (bias.dtype, bias.zero_point) == (torch.int32, 0)
        assert bias.scale == pytest.approx(source.scale * weight.scale, rel=1e-6)
        assert weight.dtype is torch.int8
        assert (weight.zero_point == 0) is is_symmetric
        assert str(source.dtype) == f"torch.{activation}"
        assert is_dequantize(head.args[1])
        assert constant(head.args[2].args[0]).dtype is torch.int32  # type: ignore[union-attr]
    assert quantized_value(linear.args[0]) is calls(converted, "amax")[0]
    assert sqnr_db(model(x), converted(x)) > 25.0
