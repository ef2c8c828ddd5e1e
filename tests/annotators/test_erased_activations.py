"""Folded activations that are erased when the model is converted: saturation alone stands for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantmark.annotators.blocks import clamp_bounds
from quantmark.configs.base import BackendConfig, BlockRules
from quantmark.observers.qparams import INT16_SYMMETRIC
from support.flow import minmax_config, quantize

KEPT = minmax_config()
ERASED = replace(KEPT, blocks=BlockRules(erase_activations=True))
TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.25, 0.5),
    "clamp at one end": lambda x: x.clamp(max=0.3),
    "clamp in a row, dropout between": lambda x: F.dropout(x.clamp(-0.5, 0.5), training=False).relu(),
}
HEADS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "conv": lambda conv, x: conv(x),
    "add": lambda conv, x: conv(x) + x,
    "sub": lambda conv, x: x - conv(x),
    "mul": lambda conv, x: conv(x) * x,
}


class Net(nn.Module):
    """A head and a tail, read by another convolution."""

    def __init__(self, head: str, tail: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.head, self.tail = HEADS[head], TAILS[tail]

    def forward(self, x: Tensor) -> Any:
        return self.second(self.tail(self.head(self.first, x)))


def converted(model: nn.Module, config: BackendConfig, *, qat: bool = False) -> Any:
    torch.manual_seed(1)
    x = torch.randn(2, 4, 6, 6)
    found = quantize(model, (x,), config, qat=qat).converted
    clamps = [node for node in found.graph.nodes if node.op == "call_function" and clamp_bounds(node) is not None]
    return found, clamps, x


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("head", HEADS)
def test_what_is_erased_changes_no_bit(head: str, tail: str) -> None:
    torch.manual_seed(0)
    model = Net(head, tail).eval()
    erased, none, x = converted(model, ERASED)
    kept, some, _ = converted(model, KEPT)
    assert (none, bool(some)) == ([], True)
    torch.testing.assert_close(erased(3 * x), kept(3 * x), rtol=0, atol=0)


def test_in_training_too() -> None:
    torch.manual_seed(0)
    _, none, _ = converted(Net("add", "relu").eval(), replace(ERASED, is_qat=True), qat=True)
    assert none == []


def test_an_activation_that_saturation_does_not_stand_for_is_kept() -> None:
    symmetric = minmax_config(INT16_SYMMETRIC, blocks=BlockRules(erase_activations=True))
    _, erased, _ = converted(Net("add", "hardtanh").eval(), symmetric)
    assert len(erased) == 1  # its ends differ


def test_an_activation_that_another_op_reads_is_kept() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.conv(x)
            return y.relu(), y.sigmoid()

    found, clamps, x = converted(Twice().eval(), ERASED)
    assert len(clamps) == 1
    assert found(x)[0].min() == 0.0
