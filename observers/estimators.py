"""Estimators: how a range is drawn from the batches that an observer sees.

An estimator is an `nn.Module` whose whole state is registered buffers (so it follows `.to`, `state_dict` and
`copy.deepcopy`). It knows nothing of graphs, families or qparams sharing; the observer around it does.

Values that float32 can't hold (NaN, infinities, float64 beyond 3.4e38) never enter a range:
`nonfinite_batches` counts the batches that had some, and the rest of such a batch still counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from . import histogram
from .errors import ConfigError, RangeError
from .ranges import Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from .qparams import Scheme

_LARGEST: Final = float(torch.finfo(torch.float32).max)


class KeepsDtypes(nn.Module):
    """A module whose own buffers keep their dtypes: `model.half()` must not round a range."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow device moves, not changes of dtype."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class Estimator(KeepsDtypes, ABC):
    """Collects statistics of one tensor over batches and turns them into a range."""

    min_val: Tensor
    max_val: Tensor
    nonfinite_batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("min_val", torch.tensor(float("inf"), dtype=torch.float32))
        self.register_buffer("max_val", torch.tensor(float("-inf"), dtype=torch.float32))
        self.register_buffer("nonfinite_batches", torch.tensor(0, dtype=torch.int64))

    @abstractmethod
    def update(self, values: Tensor) -> None:
        """Take in one batch: a detached, non-empty floating-point tensor of any shape and float dtype."""

    def range(self, scheme: Scheme) -> Range | None:  # noqa: ARG002  (min-max needs no scheme)
        """Return the range to quantize with `scheme`, or None if no finite value was seen."""
        low, high = self.min_val.item() + 0.0, self.max_val.item() + 0.0  # + 0.0 turns -0.0 into 0.0
        return Range(low, high) if low <= high else None

    def fill(self, range_: Range) -> None:
        """Set the state as if exactly `range_`, rounded to float32, had been seen."""
        self.reset()
        self.min_val.fill_(range_.min)
        self.max_val.fill_(range_.max)

    def absorb(self, other: Estimator) -> None:
        """Set the state as if the data of `other` had been seen: its histogram where both keep one, else its range."""
        low, high = float(other.min_val), float(other.max_val)
        self.reset()
        if low <= high:
            self.fill(Range(low, high))

    def reset(self) -> None:
        """Forget all batches."""
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))
        self.nonfinite_batches.zero_()

    def extra_repr(self) -> str:
        """Return the observed ends, for `print(model)`."""
        return f"min_val={self.min_val.item():.6g}, max_val={self.max_val.item():.6g}"

    def _drop_nonfinite(self, values: Tensor) -> Tensor:
        self.nonfinite_batches += 1
        return values[values.to(torch.float32).isfinite()]


class MinMaxEstimator(Estimator):
    """The exact minimum and maximum of all finite values seen."""

    def update(self, values: Tensor) -> None:
        """Take in one batch."""
        low, high = torch.aminmax(values)
        self._extend(values, low.item(), high.item())

    def merge(self, other: MinMaxEstimator) -> None:
        """Take in everything that `other` saw."""
        torch.minimum(self.min_val, other.min_val, out=self.min_val)
        torch.maximum(self.max_val, other.max_val, out=self.max_val)
        self.nonfinite_batches += other.nonfinite_batches

    def _extend(self, values: Tensor, low: float, high: float) -> Tensor:
        """Widen the state to [low, high], the ends of `values`; return the finite values."""
        if not (low >= -_LARGEST and high <= _LARGEST):  # also true if either is NaN
            values = self._drop_nonfinite(values)
            if values.numel() == 0:
                return values
            ends = torch.aminmax(values)
            low, high = ends.min.item(), ends.max.item()
        if low < self.min_val.item():
            self.min_val.fill_(low)
        if high > self.max_val.item():
            self.max_val.fill_(high)
        return values


class MovingAverageEstimator(Estimator):
    """The exponential moving average of each batch's minimum and maximum, after a start that covers every batch.

    Until 1 / averaging_constant batches were seen an average says little of what a batch may hold, and the first one
    would weigh most; so that long the range is that of min-max. From then on it follows the batches, as torchao's
    observer of that name does.

    Args:
        averaging_constant: the weight of the newest batch, in (0, 1].

    Raises:
        ConfigError: if the constant is not in (0, 1].
    """

    batches: Tensor

    def __init__(self, averaging_constant: float = 0.01) -> None:
        super().__init__()
        if not 0.0 < averaging_constant <= 1.0:
            raise ConfigError(f"averaging_constant must be in (0, 1], got {averaging_constant}")
        self.averaging_constant = averaging_constant
        self.register_buffer("batches", torch.tensor(0, dtype=torch.int64))

    def update(self, values: Tensor) -> None:
        """Take in one batch."""
        low, high = torch.aminmax(values)
        if not (low.item() >= -_LARGEST and high.item() <= _LARGEST):
            values = self._drop_nonfinite(values)
            if values.numel() == 0:
                return
            low, high = torch.aminmax(values)
        low, high = low.to(self.min_val), high.to(self.max_val)
        self.batches += 1
        if self.batches.item() * self.averaging_constant <= 1.0:
            torch.minimum(self.min_val, low, out=self.min_val)
            torch.maximum(self.max_val, high, out=self.max_val)
        else:
            self.min_val.lerp_(low, self.averaging_constant)
            self.max_val.lerp_(high, self.averaging_constant)

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        self.batches.zero_()


class HistogramEstimator(MinMaxEstimator):
    """The range with the least expected squared error, searched on a logarithmic histogram of the values.

    The bins are fixed (see `histogram`), so the state does not depend on the order of the batches, and two
    states merge exactly, by addition. Of a batch of up to `histogram.EXACT_ELEMENTS` (131072) elements every
    value is counted, so how the data is cut into batches does not matter either; of a larger one the tails
    are counted exactly, the body by a strided sample. Minimum and maximum are always exact. Takes 64 KiB.

    After `fill` the range is the filled one, widened by whatever is seen later, until `reset`.
    """

    counts: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(histogram.BINS, dtype=torch.int64))
        self.register_buffer("filled", torch.tensor(False))

    def update(self, values: Tensor) -> None:
        """Take in one batch."""
        if values.numel() <= histogram.EXACT_ELEMENTS:
            low, high = torch.aminmax(values)
            values = self._extend(values, low.item(), high.item())
            if values.numel():
                self.counts += histogram.count(values)
            return
        batch = histogram.Rows.of(values)
        finite = self._extend(values, *batch.ends())
        if finite.numel() != values.numel():
            if finite.numel() == 0:
                return
            batch = histogram.Rows.of(finite)
        self.counts += batch.count()

    def range(self, scheme: Scheme) -> Range | None:
        """Return the range of least expected squared error, min-max if nothing is gained by clipping."""
        seen = super().range(scheme)
        if seen is None or self.filled.item():
            return seen
        return histogram.search(self.counts.cpu().numpy(), seen, scheme)

    def merge(self, other: MinMaxEstimator) -> None:
        """Take in everything that `other` saw; it must keep a histogram too."""
        if not isinstance(other, HistogramEstimator):
            raise RangeError("a histogram can't be merged with a bare range; use absorb")
        super().merge(other)
        self.counts += other.counts
        self.filled |= other.filled

    def absorb(self, other: Estimator) -> None:
        """Set the state as if the data of `other` had been seen."""
        if not isinstance(other, HistogramEstimator):
            super().absorb(other)
            return
        self.reset()
        self.merge(other)

    def fill(self, range_: Range) -> None:
        """Set the state as if exactly `range_` had been seen."""
        super().fill(range_)
        self.filled.fill_(True)

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        self.counts.zero_()
        self.filled.fill_(False)


class PercentileEstimator(HistogramEstimator):
    """The range that leaves a given share of the values beyond it at each end, whatever they are.

    For data with rare wild values that carry nothing, such as one sample in thousands a thousand times too large: in
    squared error keeping it pays, so `HistogramEstimator` keeps it. Not a default: the same numbers can be a heat map
    with one peak, which is all that matters.

    Args:
        percent: the share of values to keep at each end, in percent.
    """

    def __init__(self, percent: float = 99.9) -> None:
        super().__init__()
        self.percent = percent

    def range(self, scheme: Scheme) -> Range | None:
        """Return the range between the percentiles."""
        seen = MinMaxEstimator.range(self, scheme)
        if seen is None or self.filled.item():
            return seen
        return histogram.percentile(self.counts.cpu().numpy(), seen, self.percent)
