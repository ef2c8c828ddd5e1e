"""What Arm's passes do to a graph before annotation stays in the graph: neither weights nor names are lost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantmark import BackendQuantizer, MissingRangeError, configs, observe_ranges, quantize, sqnr_db

CONFIG = configs.arm_tosa()


class Scaled(nn.Module):
    """A convolution whose output is scaled: Arm's passes write the factor into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.conv(x) * 4.0
        return scaled


class Attends(nn.Module):
    """Ops that are taken apart (softmax, mean, norm), beside ops that are called as their parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x)) + x
        return torch.softmax(y * y, -1).mean(1) - x.sum(1)


class Negates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return -F.relu(self.conv(x))


def batches(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(3)]


def test_the_users_weights_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, data = Scaled().eval(), batches(2, 4, 8, 8)
    before = copy.deepcopy(model.state_dict())
    program = torch.export.export(model, (data[0],))
    first, second = (quantize(program, data, CONFIG, progress=False).model for _ in range(2))
    assert torch.equal(first(data[0]), second(data[0]))
    assert sqnr_db(model(data[0]), first(data[0])) > 35
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ranges_are_found_by_the_names_of_the_first_export() -> None:
    torch.manual_seed(0)
    model, data = Attends().eval(), batches(4, 6, 8)
    program = torch.export.export(model, (data[0],))
    with pytest.raises(MissingRangeError, match="quantizer="):
        quantize(program, data, BackendQuantizer(CONFIG, ranges=observe_ranges(program, data)), progress=False)
    table = observe_ranges(program, data, quantizer=BackendQuantizer(CONFIG))
    plain = observe_ranges(program, data)
    same = [name for name in plain if name in table]
    assert {"linear", "layer_norm", "softmax", "mean", "add", "mul", "sub"} <= set(same)
    for name in same:
        assert table[name].range.max == pytest.approx(plain[name].range.max, rel=1e-4, abs=1e-4)
    one = quantize(program, data, CONFIG, progress=False).model
    other = quantize(program, data, BackendQuantizer(CONFIG, ranges=table), progress=False).model
    assert torch.equal(one(data[0]), other(data[0]))


def test_a_negated_activation_keeps_its_contract() -> None:
    torch.manual_seed(0)
    model, data = Negates().eval(), batches(2, 4, 8, 8)
    found = quantize(model, data, CONFIG, progress=False)
    assert sqnr_db(model(data[0]), found.model(data[0])) > 38
    assert found.report.findings == ()


def test_16_bit_with_headroom_is_no_alarm() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval(), batches(2, 4, 8, 8)
    assert quantize(model, data, configs.arm_tosa(activation="int16"), progress=False).report.findings == ()


def test_a_convolution_that_took_in_a_factor_has_the_range_of_the_product() -> None:
    torch.manual_seed(0)
    model, data = Scaled().eval(), batches(2, 4, 8, 8)
    program = torch.export.export(model, (data[0],))
    one = quantize(program, data, CONFIG, progress=False).model
    for source in (None, BackendQuantizer(CONFIG)):  # a table made for no quantizer cost 30 dB
        ranges = observe_ranges(program, data, quantizer=source)
        other = quantize(program, data, BackendQuantizer(CONFIG, ranges=ranges), progress=False).model
        assert torch.equal(one(data[0]), other(data[0]))


class ScaledTwice(nn.Module):
    """One convolution, called twice and scaled by another factor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x) * 4.0 + self.conv(x.abs()) * 0.5
        return found


def test_a_layer_that_is_called_twice_keeps_both_factors() -> None:
    torch.manual_seed(0)
    model, data = ScaledTwice().eval(), batches(2, 4, 8, 8)
    found = quantize(model, data, CONFIG, progress=False)
    assert sqnr_db(model(data[0]), found.model(data[0])) > 33
