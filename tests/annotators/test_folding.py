"""Batch norms that no weighted op takes in; what becomes of the others is in test_conversion.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

from quantmark import BackendQuantizer, configs, observe_ranges, quantize, sqnr_db
from quantmark.configs import BackendConfig
from support.flow import calls, export


class PreActivated(nn.Module):
    """Norms before their convolutions, each behind an op that takes none in."""

    def __init__(self, axes: int = 2, *, affine: bool = True) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[axes]
        self.first, self.second = norm(6, affine=affine), norm(8, affine=affine)
        self.conv: nn.Module = conv(6, 8, 3, padding=1)
        for module in (self.first, self.second):
            nn.init.uniform_(module.running_mean, -1.0, 1.0)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.01, 4.0)  # type: ignore[arg-type]
            if affine:
                nn.init.uniform_(module.weight, -2.0, 2.0)
                nn.init.uniform_(module.bias, -1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.relu(self.first(x)))
        return F.relu(self.second(y + y.flip(0)))


def model(axes: int = 2, *, affine: bool = True) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return PreActivated(axes, affine=affine).eval(), [torch.randn(4, 6, *[6] * axes) for _ in range(4)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_norm_alone_is_a_block_with_the_activation_behind_it(axes: int, affine: bool) -> None:
    net, batches = model(axes, affine=affine)
    config = BackendConfig()
    graph = BackendQuantizer(config).transform_for_annotation(export(net, (batches[0],)))
    assert_close(graph(batches[0]), net(batches[0]), atol=1e-5, rtol=1e-5)
    found = quantize(net, batches, config, progress=False)
    assert calls(found.model, "batch_norm") == []
    assert [len(block.members) for block in found.record.blocks.values()] == [2, 1, 2]  # norm + relu, conv, norm + relu
    assert sqnr_db(net(batches[0]), found.model(batches[0])) > 34
    assert min(float(found.model(batch).min()) for batch in batches) == 0.0


def test_its_factors_are_exact_with_a_scale_per_channel() -> None:
    torch.manual_seed(0)
    net = nn.BatchNorm2d(6).eval()
    nn.init.uniform_(net.weight, 1e-3, 5.0)
    x = torch.randint(-128, 128, (4, 6, 8, 8)) / 64.0
    x[0, 0, 0, :2] = torch.tensor([-2.0, 127 / 64])
    found = quantize(net, [x], configs.xnnpack(estimator="minmax"), progress=False)
    with torch.no_grad():
        expected, got = net(x), found.model(x)
    assert float((got - expected).abs().max()) <= float(got.unique().diff().min()) * 0.51


def test_both_roads_agree_but_for_the_rounding_of_its_factors() -> None:
    net, batches = model()
    program = torch.export.export(net, (batches[0],))
    config = BackendConfig()
    table = observe_ranges(program, batches)
    one = quantize(program, batches, config, progress=False).model
    other = quantize(program, batches, BackendQuantizer(config, ranges=table), progress=False).model
    step = float(one(batches[0]).unique().diff().min())
    assert_close(one(batches[0]), other(batches[0]), atol=1.01 * step, rtol=0.0)


@pytest.mark.parametrize(
    "config", [configs.cadence(), configs.xnnpack(per_channel=False)], ids=["cadence", "one scale"]
)
def test_with_one_scale_for_all_channels_it_stays_float(config: BackendConfig) -> None:
    net, batches = model()
    found = quantize(net, batches, config, progress=False)
    assert len(calls(found.model, "batch_norm")) == 2


@pytest.mark.parametrize("factory", [configs.xnnpack, configs.arm_tosa])
def test_a_norm_that_a_convolution_takes_in_is_left_to_it(factory: Callable[[], BackendConfig]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).eval()
    found = quantize(net, [torch.randn(2, 3, 6, 6)], factory(), progress=False)
    assert len(calls(found.model, "conv2d")) == 1


class TwoReaders(nn.Module):
    """Convolutions before batch norms whose output, or whose weight, something else reads too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(6, 6, 1)
        self.first, self.second = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        for module in (self.first, self.second):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.bias, -1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if self.how == "residual":
            return F.relu(self.first(y)) + y
        if self.how == "two norms":
            return F.relu(self.first(y)) + F.relu(self.second(y))
        if self.how == "called twice":
            again: Tensor = self.conv(x * 0.5)
            return F.relu(self.first(y)) + again
        return F.relu(self.second(self.first(y)))


@pytest.mark.parametrize("how", ["residual", "two norms", "called twice", "norm after norm"])
def test_no_norm_is_folded_into_what_something_else_reads(how: str) -> None:
    """torchao folds it for all readers: 10 dB and less, with any quantizer."""
    torch.manual_seed(0)
    net = TwoReaders(how).eval()
    batches = [torch.randn(4, 6, 8, 8) for _ in range(3)]
    for config in (configs.xnnpack(), configs.cadence(), configs.arm_tosa()):
        found = quantize(net, batches, config, progress=False)
        assert sqnr_db(net(batches[0]), found.model(batches[0])) > 33
        if config.weight.per_channel:
            assert calls(found.model, "batch_norm", "alias") == []


class Forked(nn.Module):
    """Convolutions of one float input, in training read in another order than they are written in."""

    def __init__(self, function: Callable[[nn.ModuleList, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function
        layers = (nn.Sequential(nn.Conv2d(4, 4, 3, bias=bias), nn.BatchNorm2d(4)) for bias in (True, False, True))
        self.layers = nn.ModuleList([*layers, nn.Conv2d(4, 4, 3)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(self.layers, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (m[0](x), m[2](x) * 10.0),
        lambda m, x: (m[1](x), m[0](x)),
        lambda m, x: (m[1](x), m[0](x) * 2.0, m[2](x), m[3](x)),
        lambda m, x: (m[3](x), m[0](x)),
        lambda m, x: (m[0](m[2](x)), m[1](x).abs()),
    ],
    ids=["first read last", "the bias goes first", "three and one without", "one without first", "in a row"],
)
def test_convolutions_of_one_input_can_be_trained(
    function: Callable[[nn.ModuleList, Tensor], tuple[Tensor, ...]],
) -> None:
    graph = export(Forked(function).train(), (torch.randn(8, 4, 8, 8),))
    prepared = prepare_qat_pt2e(graph, BackendQuantizer(configs.xnnpack(is_qat=True)))
    (x,) = (node for node in prepared.graph.nodes if node.op == "placeholder")
    readers = [user for user in x.users if user.target != "_guards_fn"]
    assert len({id(prepared.get_submodule(str(user.target))) for user in readers}) == 1
