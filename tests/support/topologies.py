"""Ways of cutting a [4, 16] tensor for quantized and float readers, for what a hoist pass makes of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cut = Callable[[Tensor], list[Tensor]]
Q = torch.relu  # a quantized reader
FLOAT = torch.sigmoid  # a reader that Cadence's config leaves float

STRUCTURES: dict[str, Cut] = {
    "halves": lambda x: [Q(x[:, :8]), Q(x[:, 8:])],
    "small": lambda x: [Q(x[:, :3]), Q(x[:, 3:6])],
    "exact_half": lambda x: [Q(x[:, :4]), Q(x[:, 4:8])],
    "select": lambda x: [Q(x.view(4, 4, 4)[:, 0]), Q(x.view(4, 4, 4)[:, 3])],
    "row": lambda x: [Q(x[0, :8]), Q(x[0, 8:])],
    "small_view": lambda x: [Q(x[:, :1].reshape(-1)), Q(x[:, 1:2])],
    "nested": lambda x: [Q(x[:, :8][:, :4]), Q(x[:, :8][:, 4:])],
    "nested_small": lambda x: [Q(x[:, :4][:, :1]), Q(x[:, :4][:, 1:2])],
    "float_branch": lambda x: [Q(x[:, :8]), FLOAT(x[:, 8:])],
    "float_root": lambda x: [Q(x[:, :8]), Q(x[:, 8:]), FLOAT(x)],
    "output_branch": lambda x: [Q(x[:, :8]), Q(x[:, 8:]), x[:, 4:8]],
    "direct_half": lambda x: [Q(x), Q(x[:, :8])],
    "direct_quarter": lambda x: [Q(x), Q(x[:, :4])],
    "direct_view": lambda x: [Q(x), Q(x.view(8, 8)[:, :4])],
    "split": lambda x: [Q(y) for y in x.split(8, 1)],
    "split_below": lambda x: [Q(x.split(8, 1)[0]), Q(x.split(8, 1)[1][:, :4]), Q(x.split(8, 1)[1][:, 4:])],
    "chunk_below": lambda x: [Q(x.chunk(2, 1)[1][:, :4]), Q(x.chunk(2, 1)[1][:, 4:])],
    "below_slice_split": lambda x: [Q(y) for y in x[:, 4:].split(4, 1)] + [Q(x[:, :4])],
    "tensor_split": lambda x: [Q(y) for y in x.tensor_split(3, 1)],
    "tensor_split_some": lambda x: [Q(y) for y in x.tensor_split(4, 1)[:2]],
    "unbind": lambda x: [Q(y) for y in x.view(4, 4, 4).unbind(1)],
    "unbind_some": lambda x: [Q(y) for y in x.unbind(1)[:2]],
    "narrow": lambda x: [Q(x.narrow(1, 0, 8)), Q(x.narrow(1, 8, 8))],
    "transposed_root": lambda x: [Q(x.T[:8]), Q(x.T[8:])],
    "expand_as": lambda x: [Q(x[:, :1].expand_as(x)), Q(x[:, 8:])],
    "broadcast_to": lambda x: [Q(x[:, :1].broadcast_to(4, 16)), Q(x[:, 8:])],
    "view_as": lambda x: [Q(x[:, :8].reshape_as(x.view(8, 8)[:4])), Q(x[:, 8:])],
    "unfold": lambda x: [Q(x.unfold(1, 8, 8)[:, 0]), Q(x.unfold(1, 8, 8)[:, 1])],
    "type_as": lambda x: [Q(x[:, :8].type_as(x)), Q(x[:, 8:])],
    "noop_slice": lambda x: [Q(x[:, :]), Q(x[:, :4])],
    "noop_view": lambda x: [Q(x.view(4, 16)), Q(x[:, :4])],
    "hsplit": lambda x: [Q(y) for y in x.hsplit(2)],
    "index_select": lambda x: [Q(x.index_select(1, torch.arange(8))), Q(x[:, 8:])],
    "index": lambda x: [Q(x[:, [0, 1, 2, 3, 4, 5]]), Q(x[:, 8:])],
    "as_strided": lambda x: [Q(x.as_strided((4, 8), (16, 1))), Q(x[:, 8:])],
    "squeeze": lambda x: [Q(x[:, :1].squeeze(1)), Q(x[:, 8:].unsqueeze(0).squeeze())],
    "cat": lambda x: [Q(x[:, :8]), Q(torch.cat([x[:, 8:], x[:, 8:]], 1))],
    "add_slices": lambda x: [x[:, :8] + x[:, 8:]],
    "matmul": lambda x: [x[:, :8] @ x[:, 8:].t()],
    "maxpool": lambda x: [F.max_pool2d(x[:, :8].reshape(1, 1, 4, 8), 2), Q(x[:, 8:])],
    "computed": lambda x: [Q(torch.tanh(x)[:, :8]), Q(torch.tanh(x)[:, 8:])],
    "quant_root": lambda x: [Q(Q(x)[:, :8]), Q(Q(x)[:, 8:])],
    "same_slice_twice": lambda x: [Q(x[:, :8]), x[:, :8] + x[:, :8], Q(x[:, 8:])],
    "uneven_split": lambda x: [Q(x.split([6, 10], 1)[0]), Q(x.split([6, 10], 1)[1])],
    "step": lambda x: [Q(x[:, ::2]), Q(x[:, 1::2])],
    "float_between": lambda x: [Q(FLOAT(x[:, :8])), Q(x[:, 8:])],
}


def _through(move: Callable[[Tensor], Tensor]) -> Cut:
    """Cut in halves, the left one read through an op."""
    return lambda x: [Q(move(x[:, :8])), Q(x[:, 8:])]


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed_branch": lambda y: y.T,
    "matrix_transpose": lambda y: y.mT,
    "adjoint": lambda y: y.adjoint(),
    "t": lambda y: y.t(),
    "permute": lambda y: y.permute(1, 0),
    "expand": lambda y: y.unsqueeze(0).expand(2, 4, 8),
    "ravel": lambda y: y.ravel(),
    "unflatten": lambda y: y.unflatten(1, (2, 4)),
    "unfold_branch": lambda y: y.unfold(1, 4, 4),
    "cast": lambda y: y.to(torch.float32),
    "dropout": lambda y: F.dropout(y, training=False),
    "contiguous": lambda y: y.contiguous(),
    "clone": lambda y: y.clone(),
    "detach": lambda y: y.detach(),
    "alias": torch.ops.aten.alias,
    "positive": lambda y: +y,
    "flip": lambda y: y.flip(1),
    "rot90": lambda y: y.rot90(),
    "repeat_interleave": lambda y: y.repeat_interleave(2, 1),
    "pixel_shuffle": lambda y: F.pixel_shuffle(y.reshape(1, 4, 2, 4), 2),
    "channel_shuffle": lambda y: F.channel_shuffle(y.reshape(1, 4, 2, 4), 2),
    "diagonal": lambda y: y.diagonal(),
    "pad": lambda y: F.pad(y, (1, 1)),
}
TOPOLOGIES: dict[str, Cut] = {**STRUCTURES, **{name: _through(move) for name, move in MOVES.items()}}
KEPT_OUT_ON_PURPOSE = {"detach", "alias", "noop_slice"}
"""Foreseen although the pass alone does not fire: later versions of the graph have no alias, and no full slice."""


class Many(nn.Module):
    """An input for each topology."""

    def __init__(self, cuts: list[Cut]) -> None:
        super().__init__()
        self.cuts = cuts

    def forward(self, *x: Tensor) -> list[Tensor]:
        return [output for cut, value in zip(self.cuts, x, strict=True) for output in cut(value)]


def spread(seed: int) -> Tensor:
    """Data whose every part has another range."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.tensor([1.0 + j**3 for j in range(16)])
    rows = torch.tensor([[1.0], [2.5], [7.0], [20.0]])
    return torch.randn(4, 16, generator=generator) * columns * rows
