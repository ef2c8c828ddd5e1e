"""A small model in which a bit of everything is decided."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Packed(nn.Module):
    """A packed input, cut into a narrow and a wide branch; a fused block; a join; an op that stays float."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.act(self.narrow(x[:, :4])), self.wide(x[:, 4:]) * 1.5], 1)
        return torch.cumsum(joined, 1)


def packed(seed: int = 0) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(seed)
    x = torch.rand(8, 8) * 2.0 - 1.0
    x[:, 4:] *= 6.0
    return Packed().eval(), (x,)
