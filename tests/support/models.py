"""Whole networks with random weights, small enough for a test: one of each kind that users deploy."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, ...]]


def _randomize_batch_norms(model: nn.Module) -> None:
    """Give batch norms statistics as a trained network has them: no channel is at its default."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]


def _conv(
    cin: int, cout: int, kernel: int = 3, stride: int = 1, groups: int = 1, *, act: nn.Module | None = None
) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(cout),
    ]
    return nn.Sequential(*layers, *([act] if act is not None else []))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; with a skip where the shapes allow it."""

    def __init__(self, cin: int, cout: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = cin * expand
        self.skip = stride == 1 and cin == cout
        self.body = nn.Sequential(
            _conv(cin, hidden, 1, act=nn.ReLU6()),
            _conv(hidden, hidden, 3, stride, hidden, act=nn.ReLU6()),
            _conv(hidden, cout, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", x + self.body(x) if self.skip else self.body(x))


class MobileNet(nn.Module):
    """MobileNetV2-like: 22 convolutions, 15 relu6."""

    def __init__(self) -> None:
        super().__init__()
        plan = [(16, 16, 1, 2), (16, 24, 2, 3), (24, 24, 1, 3), (24, 32, 2, 3), (32, 32, 1, 3), (32, 32, 1, 3)]
        self.stem = _conv(3, 16, 3, 2, act=nn.ReLU6())
        self.blocks = nn.Sequential(*(InvertedResidual(*p) for p in plan))
        self.tail = nn.Sequential(_conv(32, 64, 1, act=nn.ReLU6()), _conv(64, 64, 1, act=nn.ReLU6()))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.fc(self.pool(self.tail(self.blocks(self.stem(x)))).flatten(1)))


class BasicBlock(nn.Module):
    """Two convolutions and a skip, with a relu behind the add."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = _conv(cin, cout, 3, stride, act=nn.ReLU(inplace=True)), _conv(cout, cout)
        self.down = _conv(cin, cout, 1, stride) if stride != 1 or cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.b(self.a(x)) + self.down(x))


class ResNet(nn.Module):
    """ResNet-like: residual add + relu."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 16, 3, 2, act=nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.blocks(self.pool(self.stem(x)))))


class ShuffleUnit(nn.Module):
    """Half of the channels pass by, the other half is convolved; then the channels are shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.body = nn.Sequential(
            _conv(half, half, 1, act=nn.ReLU()), _conv(half, half, 3, 1, half), _conv(half, half, 1, act=nn.ReLU())
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        y = torch.cat([a, self.body(b)], 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleNet(nn.Module):
    """ShuffleNet-like: chunk, cat, channel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 24, 3, 2, act=nn.ReLU())
        self.units = nn.Sequential(*(ShuffleUnit(24) for _ in range(3)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.units(self.stem(x))))


class UNet(nn.Module):
    """U-Net-like: cat skips, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _conv(3, 8, act=nn.ReLU()), _conv(8, 16, act=nn.ReLU())
        self.mid = _conv(16, 32, act=nn.ReLU())
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.dec2, self.dec1 = _conv(32, 16, act=nn.ReLU()), _conv(16, 8, act=nn.ReLU())
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.mid(F.max_pool2d(b, 2))
        y = self.dec2(torch.cat([self.up2(y), b], 1))
        return cast("Tensor", self.out(self.dec1(torch.cat([self.up1(y), a], 1))))


class Detector(nn.Module):
    """A small detector head: boxes in pixels beside class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(3, 16, 3, 2, act=nn.ReLU6()), _conv(16, 16, 3, 2, act=nn.ReLU6()))
        self.box, self.score = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        box = torch.sigmoid(self.box(y)).flatten(2) * 64.0
        return torch.cat([box, torch.sigmoid(self.score(y)).flatten(2)], 1)


class Encoder(nn.Module):
    """A transformer encoder block: qkv split, softmax, gelu, layer norm."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (
            y.reshape(n, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, -1)
        x = x + self.proj((scores @ v).transpose(1, 2).reshape(n, t, d))
        return cast("Tensor", x + self.down(F.gelu(self.up(self.norm2(x)))))


class Keywords(nn.Module):
    """A keyword-spotting net on conv1d."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for cin, cout in ((20, 32), (32, 32), (32, 48)):
            layers += [nn.Conv1d(cin, cout, 5, 2, 2, bias=False), nn.BatchNorm1d(cout), nn.ReLU(), nn.Dropout(0.1)]
        self.body, self.fc = nn.Sequential(*layers), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.fc(self.body(x).mean(-1)))


class Sequence(nn.Module):
    """A GRU-free sequence model: dilated causal convolutions with gates and skips."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, channels, 1)
        self.gates = nn.ModuleList([nn.Conv1d(channels, 2 * channels, 2, dilation=2**i) for i in range(3)])
        self.mixes = nn.ModuleList([nn.Conv1d(channels, channels, 1) for _ in range(3)])
        self.last = nn.Conv1d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(y, (2**i, 0))).chunk(2, 1)
            y = y + mix(torch.tanh(a) * torch.sigmoid(b))
        return cast("Tensor", self.last(F.relu(y)))


def _data(*shape: int) -> Callable[[], Batches]:
    """Return a maker of batches whose samples differ in loudness, as real ones do."""
    return lambda: [(torch.randn(4, *shape) * torch.randn(4, *(1 for _ in shape)).mul(0.5).exp(),) for _ in range(4)]


WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batches]]] = {
    "mobilenet": (MobileNet, _data(3, 64, 64)),
    "resnet": (ResNet, _data(3, 48, 48)),
    "shufflenet": (ShuffleNet, _data(3, 32, 32)),
    "unet": (UNet, _data(3, 32, 32)),
    "detector": (Detector, _data(3, 32, 32)),
    "encoder": (Encoder, _data(12, 32)),
    "keywords": (Keywords, _data(20, 49)),
    "sequence": (Sequence, _data(8, 40)),
}


def whole_model(name: str, seed: int = 0) -> tuple[nn.Module, Batches, Batches]:
    """Return a network in eval mode, batches to calibrate it with, and others to test it on."""
    torch.manual_seed(seed)
    make, data = WHOLE[name]
    model = make()
    _randomize_batch_norms(model)
    return model.eval(), data(), data()
