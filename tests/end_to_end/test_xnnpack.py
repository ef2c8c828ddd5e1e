"""What the ExecuTorch runtime computes with XNNPACK is what the converted graph says, to one step of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from quantmark import check, configs, sqnr_db
from quantmark.annotators.blocks import clamp_bounds
from support.flow import is_dequantize, outputs, pair_of, quantize, quantized_value
from support.xnnpack import OnRuntime, run_both

CONFIG = configs.xnnpack(estimator="minmax")

TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "hardtanh(-1, 1)": F.hardtanh,
    "relu_": F.relu_,
    "relu6": F.relu6,
    "ReLU6": nn.ReLU6(),
    "clamp(0, 3)": lambda x: x.clamp(0, 3),
    "clamp_min(0)": lambda x: torch.clamp_min(x, 0.0),
    "clamp(max=0.5)": lambda x: x.clamp(max=0.5),
    "clamp(0.25, 1)": lambda x: x.clamp(0.25, 1.0),
}
ALL = list(TAILS)
FEW = ALL[:3]


class AddMM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.randn(6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class MM(AddMM):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight)


def norm(channels: int) -> nn.BatchNorm2d:
    """A batch norm that has seen data."""
    found = nn.BatchNorm2d(channels)
    for tensor, low, high in ((found.weight, -2.0, 2.0), (found.bias, -1.0, 1.0), (found.running_mean, -1.0, 1.0)):
        nn.init.uniform_(tensor, low, high)  # type: ignore[arg-type]
    return found


IMAGE, SIGNAL, ROWS = (2, 8, 7, 7), (2, 8, 11), (16, 8)
HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "conv1d": (lambda: nn.Conv1d(8, 6, 3), SIGNAL, FEW),
    "conv2d": (lambda: nn.Conv2d(8, 6, 3, padding=1, stride=2), IMAGE, ALL),
    "conv2d-bn": (lambda: nn.Sequential(nn.Conv2d(8, 6, 3, padding="same"), nn.BatchNorm2d(6)), IMAGE, FEW),
    "grouped": (lambda: nn.Conv2d(8, 6, 3, groups=2), IMAGE, FEW),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), IMAGE, FEW),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 6, 3), SIGNAL, FEW),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, stride=2), IMAGE, FEW),
    "transposed-grouped": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2), IMAGE, FEW),
    "norm": (lambda: norm(8), IMAGE, FEW),
    "linear": (lambda: nn.Linear(8, 6), ROWS, ALL),
    "addmm": (AddMM, ROWS, FEW),
    "mm": (MM, ROWS, FEW),
}


class Blocks(nn.Module):
    """One block per tail, each with a head of its own on the common input."""

    def __init__(self, head: Callable[[], nn.Module], tails: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head() for _ in tails)
        self.tails = tails

    def forward(self, x: Tensor) -> list[Tensor]:
        return [TAILS[tail](head(x)) for head, tail in zip(self.heads, self.tails, strict=True)]


def tolerances(converted: GraphModule) -> list[float]:
    """How far the runtime may be from each output: one step of its scale.

    A clamp that is quantized apart from its head is fused by the runtime all the same, which so drops the rounding
    between them, half a step.
    """
    found = []
    for output in outputs(converted):
        value = quantized_value(output)
        source = value.args[0]
        step = pair_of(output).scale
        if clamp_bounds(value) is not None and is_dequantize(source):
            step += pair_of(source).scale / 2
        found.append(step + 1e-6)
    return found


def distances(found: OnRuntime, index: int) -> float:
    return max(float((e[index] - r[index]).abs().max()) for e, r in zip(found.eager, found.runtime, strict=True))


def assert_agree(found: OnRuntime, converted: GraphModule, steps: int = 1) -> None:
    limits = [steps * limit for limit in tolerances(converted)]
    assert len(found.runtime[0]) == len(limits)
    apart = {i: distances(found, i) / limit for i, limit in enumerate(limits) if distances(found, i) > limit}
    assert apart == {}


@pytest.mark.parametrize("head", HEADS)
def test_a_block_runs_as_converted(head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, tails = HEADS[head]
    model, x = Blocks(make, tails).eval(), torch.randn(shape) * 2
    converted = quantize(model, (x,), CONFIG).converted
    found = run_both(converted, [(x,), (torch.randn(shape) * 3,)], tmp_path)
    assert_agree(found, converted)
    assert (found.lowered.delegates, found.lowered.outside) == (1, ())
    for tail, wanted, got in zip(tails, model(x), found.runtime[0], strict=True):
        assert sqnr_db(wanted, got) > 32, tail


class Residual(nn.Module):
    """add + relu is one block; add + relu6, sub and mul + relu are not; scalars are constants."""

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        return [F.relu(a + b), F.relu6(a + b), F.relu(a - b), F.relu(a * b), a * 0.5, b + 1.0]


class Joins(nn.Module):
    """Cats whose operands share, and whose relu6 keeps its zero point and is requantized."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        a, b = self.a(a), F.relu6(self.b(b))
        return [torch.cat([a, self.a(b)], 1), torch.cat([a, b], 1), F.relu(torch.cat([b, a], 1))]


class Pools(nn.Module):
    """What passes qparams through, and the global pool, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(72, 6), nn.Linear(8, 6)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        y = F.relu(self.conv(a + b))
        pooled = F.max_pool2d(y, 2)
        return [
            self.linear(pooled.flatten(1)),
            self.head(F.adaptive_avg_pool2d(y, 1).flatten(1)),
            self.head(y.mean((2, 3), keepdim=True).view(-1, 8)),
            pooled.permute(0, 2, 3, 1),
        ]


class Twice(nn.Module):
    """Layers called twice, with inputs of different scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(7, 6)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        small = b * 0.1
        return [layer(x) for layer in (self.conv, self.linear) for x in (a, small)]


class HalfFloat(nn.Module):
    """A layer called twice, once with an output whose halves are too unlike for one scale: that call stays float."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(16, 16, bias=False)
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(16, 4)
        with torch.no_grad():
            self.twice.weight[8:] *= 100

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.twice(x)
        return self.a(y[:, :8]), self.b(y[:, 8:]), self.c(self.twice(F.relu(x)))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("qat", [False, True])
def test_a_layer_called_twice_can_be_float_in_one_call(per_channel: bool, qat: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = HalfFloat().eval(), torch.randn(8, 16)
    config = configs.xnnpack(estimator="minmax", per_channel=per_channel, is_qat=qat)
    converted = quantize(model, (x,), config, qat=qat).converted
    first, *others = [n for n in converted.graph.nodes if str(n.target).startswith("aten.linear.")]
    assert [is_dequantize(head.args[1]) for head in (first, *others)] == [False, True, True, True, True]
    check(converted, config).raise_if_unsafe()
    ran = run_both(converted, [(x,)], tmp_path)
    for exact, eager, runtime in zip(model(x), ran.eager[0], ran.runtime[0], strict=True):
        assert sqnr_db(exact, eager) > (20 if qat else 30)  # one step of training, which saw roundings not yet decided
        assert sqnr_db(eager, runtime) > 40


class SmallNet(nn.Module):
    """Inverted residuals as in MobileNetV2, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6())
        self.blocks = nn.ModuleList(self.inverted(16, 32) for _ in range(2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))

    @staticmethod
    def inverted(channels: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, hidden, 1),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, channels, 1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def run_net(model: nn.Module, folder: Path, batches: Sequence[tuple[Tensor, ...]], dynamic: object = None) -> OnRuntime:
    converted = quantize(model, batches[0], CONFIG, dynamic=dynamic).converted
    return run_both(converted, batches, folder, dynamic=dynamic)


@pytest.mark.parametrize(("model", "steps"), [(Residual, 1), (Twice, 2), (Joins, 2), (Pools, 3)])
def test_other_ops_run_as_converted(model: type[nn.Module], steps: int, tmp_path: Path) -> None:
    """A step of difference upstream can become another downstream: `steps` is the number of blocks in a row."""
    torch.manual_seed(0)
    net, x = model().eval(), (torch.randn(IMAGE), torch.randn(IMAGE))
    converted = quantize(net, x, CONFIG).converted
    found = run_both(converted, [x], tmp_path)
    assert_agree(found, converted, steps)
    assert (found.lowered.delegates, found.lowered.outside) == (1, ())
    for wanted, got in zip(net(*x), found.runtime[0], strict=True):
        assert sqnr_db(wanted, got) > 28


def test_a_net_is_one_delegate_and_as_good_as_the_converted_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = SmallNet().eval(), torch.randn(8, 8, 7, 7)
    found = run_net(model, tmp_path, [(x,)])
    assert (found.lowered.delegates, found.lowered.outside) == (1, ())
    reference = model(x)
    (eager,), (runtime,) = found.eager[0], found.runtime[0]
    assert sqnr_db(reference, eager) > 25
    assert sqnr_db(reference, runtime) > sqnr_db(reference, eager) - 1.0


def test_the_batch_may_vary(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SmallNet().eval()
    batches = [(torch.randn(size, 8, 7, 7),) for size in (7, 4, 2)]  # executorch 1.5.1 errs where a size grows again
    found = run_net(model, tmp_path, batches, ({0: torch.export.Dim("batch", min=2, max=16)},))
    for (x,), (eager,), (runtime,) in zip(batches, found.eager, found.runtime, strict=True):
        assert runtime.shape == (len(x), 5)
        assert sqnr_db(eager, runtime) > 25
