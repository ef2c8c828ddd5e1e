"""One small model per op that Arm's config names: each must lower, or has no place in the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Call(nn.Module):
    """A function, with layers of its own, behind a multiplication (so that its input is a computed, signed tensor)."""

    gain: Tensor
    index: Tensor

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.register_buffer("gain", torch.tensor([0.75]))
        self.register_buffer("index", torch.tensor([2, 0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        if self.layers:
            return self.function(self, x)
        return self.function(x)


def _layer(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Call(lambda m, x: m.layers[0](x), layer())


def _call(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Call(function)


def _indexed(function: Callable[[Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Call(lambda m, x: function(x, m.index), nn.Identity())


IMAGE, ROWS, SIGNAL, VOLUME = (1, 4, 8, 8), (1, 6, 8), (1, 4, 12), (1, 2, 4, 6, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    # heads
    "conv1d": (_layer(lambda: nn.Conv1d(4, 6, 3)), SIGNAL),
    "conv2d": (_layer(lambda: nn.Conv2d(4, 6, 3, padding=1)), IMAGE),
    "conv3d": (_layer(lambda: nn.Conv3d(2, 3, 3)), VOLUME),
    "conv_transpose2d": (_layer(lambda: nn.ConvTranspose2d(4, 6, 2, 2)), IMAGE),
    "conv_transpose2d, groups": (_layer(lambda: nn.ConvTranspose2d(4, 4, 2, 2, groups=2)), IMAGE),
    "linear": (_layer(lambda: nn.Linear(8, 6)), ROWS),
    # own qparams
    "add": (_call(lambda x: x + x.sigmoid()), IMAGE),
    "sub": (_call(lambda x: x - x.sigmoid()), IMAGE),
    "mul": (_call(lambda x: x * x.sigmoid()), IMAGE),
    "mm": (_call(lambda x: torch.mm(x[0], x[0].sigmoid().t())), ROWS),
    "bmm": (_call(lambda x: torch.bmm(x, x.sigmoid().transpose(1, 2))), ROWS),
    "matmul": (_call(lambda x: torch.matmul(x, x.sigmoid().transpose(1, 2))), ROWS),
    "minimum": (_call(lambda x: torch.minimum(x, x.sigmoid())), IMAGE),
    "maximum": (_call(lambda x: torch.maximum(x, x.sigmoid())), IMAGE),
    "sum": (_call(lambda x: x.sum(-1)), IMAGE),
    "abs": (_call(torch.abs), IMAGE),
    "exp": (_call(torch.exp), IMAGE),
    "log": (_call(lambda x: torch.log(x.sigmoid() + 1.0)), IMAGE),
    "reciprocal": (_call(lambda x: torch.reciprocal(x.sigmoid() + 1.0)), IMAGE),
    "rsqrt": (_call(lambda x: torch.rsqrt(x.sigmoid() + 1.0)), IMAGE),
    "sigmoid": (_call(torch.sigmoid), IMAGE),
    "tanh": (_call(torch.tanh), IMAGE),
    "hardsigmoid": (_call(F.hardsigmoid), IMAGE),
    "hardswish": (_call(F.hardswish), IMAGE),
    "leaky_relu": (_call(F.leaky_relu), IMAGE),
    "elu": (_call(F.elu), IMAGE),
    "gelu": (_call(F.gelu), IMAGE),
    "silu": (_call(F.silu), IMAGE),
    "pow": (_call(lambda x: torch.pow(x, 2)), IMAGE),
    "sin": (_call(torch.sin), IMAGE),
    "cos": (_call(torch.cos), IMAGE),
    "erf": (_call(torch.erf), IMAGE),
    "floor": (_call(torch.floor), IMAGE),
    "ceil": (_call(torch.ceil), IMAGE),
    # shared qparams
    "squeeze": (_call(lambda x: x.squeeze(0)), IMAGE),
    "unsqueeze": (_call(lambda x: x[0].unsqueeze(1)), IMAGE),
    "reshape": (_call(lambda x: x.reshape(1, -1)), IMAGE),
    "repeat": (_call(lambda x: x.repeat(1, 2, 1, 1)), IMAGE),
    "expand": (_call(lambda x: x[:, :1].expand(1, 3, 8, 8)), IMAGE),
    "view": (_call(lambda x: x.view(1, -1)), IMAGE),
    "view_as": (_call(lambda x: x.view(4, 64).view_as(x)), IMAGE),
    "transpose": (_call(lambda x: x.transpose(1, 2)), IMAGE),
    "moveaxis": (_call(lambda x: torch.moveaxis(x, 1, 3)), IMAGE),
    "movedim": (_call(lambda x: torch.movedim(x, 1, 2)), IMAGE),
    "t": (_call(lambda x: x[0].t()), ROWS),
    "tile": (_call(lambda x: x.tile(1, 1, 2)), ROWS),
    "flip": (_call(lambda x: x.flip(2)), IMAGE),
    "contiguous": (_call(lambda x: x.transpose(1, 2).contiguous()), ROWS),
    "unflatten": (_call(lambda x: x.unflatten(2, (2, 4))), ROWS),
    "permute": (_call(lambda x: x.permute(0, 2, 3, 1)), IMAGE),
    "flatten": (_call(lambda x: x.flatten(1)), IMAGE),
    "dropout": (_call(lambda x: F.dropout(x, training=False)), IMAGE),
    "clone": (_call(lambda x: x.clone() + 1.0), IMAGE),
    "detach": (_call(lambda x: x.detach() + 1.0), IMAGE),
    "pixel_shuffle": (_call(lambda x: F.pixel_shuffle(x, 2)), IMAGE),
    "pixel_unshuffle": (_call(lambda x: F.pixel_unshuffle(x, 2)), IMAGE),
    "max_pool2d": (_call(lambda x: F.max_pool2d(x, 2)), IMAGE),
    "amax": (_call(lambda x: x.amax(1, keepdim=True)), IMAGE),
    "amin": (_call(lambda x: x.amin(1, keepdim=True)), IMAGE),
    "relu": (_call(torch.relu), IMAGE),
    "relu6": (_call(F.relu6), IMAGE),
    "hardtanh": (_call(lambda x: F.hardtanh(x, -0.5, 0.75)), IMAGE),
    "clamp": (_call(lambda x: x.clamp(max=0.5)), IMAGE),
    "neg": (_call(torch.neg), IMAGE),
    "mean": (_call(lambda x: x.mean((2, 3))), IMAGE),
    "avg_pool2d": (_call(lambda x: F.avg_pool2d(x, 2)), IMAGE),
    "adaptive_avg_pool2d": (_call(lambda x: F.adaptive_avg_pool2d(x, 2)), IMAGE),
    "pad": (_call(lambda x: F.pad(x, (1, 1, 1, 1))), IMAGE),
    "gather": (lambda: Call(lambda m, x: x[0].gather(1, m.index.view(1, 2).expand(6, 2).long()), nn.Identity()), ROWS),
    "upsample_nearest2d": (_call(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")), IMAGE),
    "upsample_bilinear2d": (_call(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")), IMAGE),
    "index": (_indexed(lambda x, i: x[0][i]), ROWS),
    "repeat_interleave": (_call(lambda x: x.repeat_interleave(2, dim=1)), ROWS),
    # parts and joins
    "slice": (_call(lambda x: x[:, 1:3]), IMAGE),
    "select": (_call(lambda x: x[:, 1]), IMAGE),
    "narrow": (_call(lambda x: x.narrow(1, 1, 2)), IMAGE),
    "split": (_call(lambda x: [part.sigmoid() for part in x.split(2, 1)]), IMAGE),
    "split_with_sizes": (_call(lambda x: [part.sigmoid() for part in x.split([1, 3], 1)]), IMAGE),
    "chunk": (_call(lambda x: [part.sigmoid() for part in x.chunk(2, 1)]), IMAGE),
    "unbind": (_call(lambda x: [part.sigmoid() for part in x.unbind(1)]), IMAGE),
    "index_select": (_indexed(lambda x, i: x.index_select(1, i)), ROWS),
    "cat": (_call(lambda x: torch.cat([x, x.sigmoid()], 1)), IMAGE),
    "stack": (_call(lambda x: torch.stack([x, x.sigmoid()], 1)), ROWS),
    "hstack": (_call(lambda x: torch.hstack([x, x.sigmoid()])), ROWS),
    "vstack": (_call(lambda x: torch.vstack([x, x.sigmoid()])), ROWS),
    "where": (_call(lambda x: torch.where(x > 0.1, x, x.sigmoid())), IMAGE),
    "softmax": (_call(lambda x: x.softmax(-1)), ROWS),
    "layer_norm": (_layer(lambda: nn.LayerNorm(8)), ROWS),
}
