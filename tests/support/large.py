"""A network of about 500 nodes, with skips, joins, branches and ops that stay float: for what has to scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """Two branches of a chunk, one through a convolution, joined; then a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv, self.act = nn.Conv2d(half, half, 3, padding=1), nn.ReLU()
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        joined = torch.cat([left, self.act(self.conv(right))], 1)
        return torch.relu(self.project(joined) + x)


class Large(nn.Module):
    """Stages of cells; a loud softplus between them, which stays float; two heads."""

    def __init__(self, stages: int = 6, cells: int = 8, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stages = nn.ModuleList(nn.Sequential(*(Cell(channels) for _ in range(cells))) for _ in range(stages))
        self.gate = nn.Softplus()
        self.score, self.box = nn.Linear(channels, 4), nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        for stage in self.stages:
            x = stage(x) - 0.1 * self.gate(x)
        pooled = x.mean((2, 3))
        return torch.sigmoid(self.score(pooled)), self.box(pooled)


def large(seed: int = 0, **how: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Return the network and a batch for it."""
    torch.manual_seed(seed)
    return Large(**how).eval(), (torch.randn(2, 3, 8, 8),)
