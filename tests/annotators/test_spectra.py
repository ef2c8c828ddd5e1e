"""What looks at small values: the headroom of what it reads, where a table of few entries computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from quantmark import ConfigError, check
from quantmark.annotators.quantizer import BackendQuantizer
from quantmark.configs import OpRules
from quantmark.observers.plan import Cell
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import minmax_config, pair_of, quantize, quantized_value

CONFIG = minmax_config(replace(INT16_SYMMETRIC, headroom=2.0), ops=OpRules(table_headroom=1.5))


class Net(nn.Module):
    """A function of a linear's output and of its square."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


READ: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log": (lambda y: torch.log(y.exp()), "exp"),
    "rsqrt": (lambda y: torch.rsqrt(y.abs() + 1.0), "add"),
    "sqrt": (lambda y: torch.sqrt(y.abs()), "abs_1"),
    "reciprocal": (lambda y: torch.reciprocal(y.exp()), "exp"),
    "divisor": (lambda y: y / y.exp(), "exp"),
    "behind movement": (lambda y: torch.log(y.exp().unsqueeze(0)), "exp"),
}


def cells(function: Callable[[Tensor], Tensor]) -> dict[str, Cell]:
    quantizer = BackendQuantizer(CONFIG)
    quantize(Net(function), (torch.ones(2, 4),), quantizer)
    return dict(quantizer.record.account.plan.cells)


@pytest.mark.parametrize("name", READ)
def test_what_looks_at_small_values_is_read_with_less_headroom(name: str) -> None:
    function, read = READ[name]
    assert {name for name, cell in cells(function).items() if cell.headroom == 1.5} == {read}


@pytest.mark.parametrize("function", [torch.sigmoid, torch.exp, torch.square, torch.abs])
def test_others_are_read_with_the_headroom_of_their_scheme(function: Callable[[Tensor], Tensor]) -> None:
    assert all(cell.headroom is None for cell in cells(function).values())


def test_the_scale_reaches_as_far_as_the_headroom() -> None:
    model = Net(lambda y: torch.log(y.exp()))
    x = torch.linspace(-1, 1, 8).view(2, 4)
    converted = quantize(model, (x,), CONFIG).converted
    scales = {}
    for node in converted.graph.nodes:
        if "dequantize_per_tensor" in str(node.target) and node.args[0].op == "call_function":
            scales[quantized_value(node).name] = pair_of(node).scale
    y = model.linear(x).detach()
    assert scales["exp"] == pytest.approx(1.5 * y.exp().max().item() / 32767)
    assert scales["linear"] == pytest.approx(2.0 * y.abs().max().item() / 32767)


def test_a_requantize_that_takes_headroom_alone_is_no_finding() -> None:
    model = Net(lambda y: torch.log(torch.cat([y.exp(), y.tanh().exp()], 1)))
    quantizer = BackendQuantizer(CONFIG).unlink("exp")
    converted = quantize(model, (torch.linspace(-1, 1, 8).view(2, 4),), quantizer).converted
    assert [f for f in check(converted, CONFIG).findings if f.code in {"QM402", "QM502"}] == []


@pytest.mark.parametrize("headroom", [0.5, float("nan")])
def test_less_than_the_range_is_no_headroom(headroom: float) -> None:
    with pytest.raises(ConfigError, match="table_headroom"):
        OpRules(table_headroom=headroom)
