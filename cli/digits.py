"""The demo's model and data: a small network, trained on scikit-learn's bundled handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from ..workflow import track

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH: Final = 64
_HELD_OUT: Final = 360  # of 1797


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] in [0, 1] and labels [N], for training and held out."""

    train_images: Tensor
    train_labels: Tensor
    images: Tensor
    labels: Tensor

    def calibration(self) -> list[Tensor]:
        """Return the training images in batches, without what does not fill the last one."""
        return [batch for batch in self.train_images.split(BATCH) if len(batch) == BATCH]

    def right(self, logits: Tensor) -> int:
        """Return how many of the held-out digits are recognized."""
        return int((logits.argmax(1) == self.labels).sum())


def load_digits(seed: int) -> Digits:
    """Return the 1797 digits, 360 of them held out."""
    from sklearn.datasets import load_digits as bundled

    found = bundled()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    return Digits(images[_HELD_OUT:], labels[_HELD_OUT:], images[:_HELD_OUT], labels[:_HELD_OUT])


class SmallNet(nn.Module):
    """Seven blocks: conv + bn + relu, twice depthwise and pointwise + bn + relu6 each, linear + relu, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.first = _separable(16, 32)
        self.second = _separable(32, 48)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Sequential(nn.Linear(48 * 4, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits [N, 10] of images [N, 1, 8, 8]."""
        features = self.second(self.pool(self.first(self.stem(image))))
        hidden: Tensor = self.hidden(self.pool(features).flatten(1))
        logits: Tensor = self.classifier(hidden)
        return logits


def _separable(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def train(digits: Digits, epochs: int, seed: int) -> SmallNet:
    """Return the network after `epochs` passes over the training digits, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SmallNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        steps = list(_steps(digits, epochs))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(steps))
        for batch in track(steps, "Training"):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def _steps(digits: Digits, epochs: int) -> Iterator[Tensor]:
    """Yield the rows of each step, shuffled in every epoch."""
    for _ in range(epochs):
        order = torch.randperm(len(digits.train_labels))
        yield from (rows for rows in order.split(BATCH) if len(rows) == BATCH)
