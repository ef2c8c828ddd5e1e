"""A histogram with logarithmic bins, and the search for the range of least squared error on it.

A bin is the sign, the exponent and the first four mantissa bits of a float32: 16 bins per octave and sign,
8192 in all, whatever the data. So there is nothing to rescale when a larger value comes, and histograms add.

The search minimizes the expected squared error of quantizing a value that is uniformly distributed within its
bin. With t = x / scale and n = clamp(round(t), first, last) the error of one value is scale**2 * (t - n)**2, whose
integral over t from 0 is G(t) = n / 12 + (t - n)**3 / 3: every full code adds 1/12, and the remainder, also that
beyond the last code (clipping), adds a third of its cube. So a bin [a, b] of c values costs
c * scale**3 / (b - a) * (G(b / scale) - G(a / scale)): rounding, clipping and values that vanish in the code of 0,
in one formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from .ranges import Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from .qparams import Scheme

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Counts = np.ndarray[Any, np.dtype[np.int64]]

_SHIFT: Final = 19  # 23 mantissa bits of a float32, less the four that are kept
_SIDE: Final = 1 << (31 - _SHIFT)  # bins per sign
_NORMAL: Final = 1 << (23 - _SHIFT)  # the first bin of normal numbers
BINS: Final = 2 * _SIDE  # negative values by growing magnitude, then positive ones
EXACT_ELEMENTS: Final = 1 << 17  # the largest batch that is counted value by value
_SAMPLE: Final = 1 << 16  # the least number of values sampled from a larger batch
_ROW: Final = 64  # elements per row whose ends decide if it holds a value of the tails
_TAIL: Final = 16  # a tail is what lies beyond the bin that holds the 16th largest value of the sample

_MAX_CODES: Final = 4096  # schemes with more codes clip nothing: their rounding is far below any outlier
_ATOM: Final = 1e-7  # relative width of a bin that holds one value only
_GAIN: Final = 0.99  # the error must fall by 1 % (0.04 dB) for clipping to be worth its risk


def count(values: Tensor) -> Tensor:
    """Return the number of `values` (finite, any shape and float dtype) in each bin: int64 of shape [BINS]."""
    return torch.bincount(_bins(values.reshape(-1)), minlength=BINS)


def _bins(flat: Tensor) -> Tensor:
    return (flat.to(torch.float32).contiguous().view(torch.int32) >> _SHIFT).add_(_SIDE)


@dataclass(frozen=True)
class Rows:
    """A large batch, cut into rows of which the smallest and the largest value are known."""

    flat: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Rows:
        """Cut `values`, at least one row; what is left over is no row."""
        by_stride = sorted(range(values.dim()), key=values.stride, reverse=True)
        flat = values.permute(by_stride).reshape(-1)  # a view also of dense layouts like channels_last
        if flat.dtype == torch.float64:
            flat = flat.to(torch.float32)  # whose bins these are
        rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
        return cls(flat, rows.amin(1), rows.amax(1))

    @property
    def rest(self) -> Tensor:
        """The values after the last full row."""
        return self.flat[self.low.numel() * _ROW :]

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest value; NaN if there is one."""
        low, high = self.low.amin(), self.high.amax()
        if self.rest.numel():
            low, high = torch.minimum(low, self.rest.amin()), torch.maximum(high, self.rest.amax())
        return low.item(), high.item()

    def count(self) -> Tensor:
        """Return the histogram: exact in both tails, weighted samples between them.

        The stride shares no factor with the number of elements, hence with no dimension of the tensor: the
        sample does not miss a channel.
        """
        stride = self.flat.numel() // _SAMPLE
        while math.gcd(stride, self.flat.numel()) != 1:
            stride -= 1
        sides = count(self.flat[::stride]).view(2, _SIDE)
        first = [_first_tail_bin(side) for side in sides]
        for side, bin_ in zip(sides, first, strict=True):
            side[bin_:] = 0
        return (sides * stride).view(-1) + self._tails(*first)

    def _tails(self, negative: int, positive: int) -> Tensor:
        """Count the values in the bins from `negative` and from `positive` on."""
        low, high = -_edge(negative), _edge(positive)
        hot = (self.low <= low) | (self.high >= high)
        found = self.flat[: hot.numel() * _ROW].view(-1, _ROW)[hot].view(-1)
        found = torch.cat((found, self.rest))
        return count(found[(found <= low) | (found >= high)])


def _first_tail_bin(side: Tensor) -> int:
    """Return the bin from which on `side` holds less than _TAIL samples; never the bin of 0."""
    beyond = side.sum() - side.cumsum(0)
    return int((beyond >= _TAIL).sum()) + 1


def _edge(bin_: int) -> float:
    """Return the lower edge of a bin, as a magnitude."""
    return float(_edges(bin_, bin_ + 1)[0])


def _edges(start: int, stop: int) -> Array:
    """Return the lower edges of bins start..stop-1 of one sign, as magnitudes."""
    index = np.arange(start, stop)
    octave, step = np.maximum(index // _NORMAL, 1), index % _NORMAL + _NORMAL * (index >= _NORMAL)
    return np.ldexp(step.astype(np.float64), octave - 127 - (23 - _SHIFT))


def search(counts: Counts, seen: Range, scheme: Scheme) -> Range:
    """Return the range within `seen` (the exact ends) of least expected squared error; `seen` if none gains.

    First one threshold clips both ends, then (affine schemes) each end is searched with the other held.
    """
    if scheme.quant_max - scheme.quant_min > _MAX_CODES or seen.min == seen.max or not counts.any():
        return seen
    error = _Error.of(counts, seen, scheme)
    floor, top = error.least_threshold, max(-seen.min, seen.max)
    limit = _minimize(lambda t: error(np.maximum(-t, seen.min), np.minimum(t, seen.max)), floor, top, 40)
    low, high = max(seen.min, -limit), min(seen.max, limit)
    if not scheme.symmetric and low < 0.0 < high:
        high = _minimize(lambda t: error(low, t), min(floor, seen.max / 8), seen.max, 24)
        low = -_minimize(lambda t: error(-t, high), min(floor, -seen.min / 8), -seen.min, 24)
        high = _minimize(lambda t: error(low, t), high / 1.2, min(high * 1.2, seen.max), 8)
    before, after = error(np.array([seen.min, low]), np.array([seen.max, high]))
    return Range(low, high) if after < before * _GAIN else seen


def _minimize(error: Callable[[Array], Array], start: float, stop: float, points: int) -> float:
    """Return where in [start, stop] (positive) a vectorized function is least: a geometric grid, refined once."""
    grid = _geometric(start, stop, points)
    at = int(np.argmin(error(grid)))
    grid = _geometric(grid[max(at - 1, 0)], grid[min(at + 1, points - 1)], 13)
    return min(float(grid[np.argmin(error(grid))]), stop)


def _geometric(start: float, stop: float, points: int) -> Array:
    grid: Array = start * (stop / start) ** (np.arange(points) / (points - 1))
    grid[-1] = stop
    return grid


@dataclass(frozen=True)
class _Error:
    """The expected squared error, summed over all values, as a function of the range."""

    edges: Array  # of the bins that matter, ascending; one more than densities
    density: Array  # values per real unit
    near_zero: float  # the error of the values so small that every candidate puts them in the code of 0
    least_threshold: float  # no magnitude below this is worth clipping at
    scheme: Scheme

    @classmethod
    def of(cls, counts: Counts, seen: Range, scheme: Scheme) -> _Error:
        codes = scheme.quant_max - scheme.quant_min
        sides = counts.reshape(2, _SIDE).astype(np.float64)
        both = sides[0] + sides[1]
        stop = int(both.nonzero()[0][-1]) + 1
        edges = _edges(0, stop + 1)
        step = (max(seen.max, 0.0) - min(seen.min, 0.0)) / codes
        least = min(_least_threshold(both[:stop], edges, step), max(-seen.min, seen.max))
        first = min(int(np.searchsorted(edges, least / codes / 8)), stop - 1)
        near_zero = float(both[:first] @ (edges[1 : first + 1] ** 2 / 3)) if first else 0.0
        ascending = np.concatenate((-edges[: first - stop - 2 : -1], edges[first:]))
        inside = np.concatenate((sides[0, first:stop][::-1], [0.0], sides[1, first:stop]))
        used = inside.nonzero()[0]
        ascending = ascending[used[0] : used[-1] + 2]
        inside = inside[used[0] : used[-1] + 1]
        ascending[0] = min(max(ascending[0], seen.min), ascending[1] - _ATOM * abs(ascending[1]))
        ascending[-1] = max(min(ascending[-1], seen.max), ascending[-2] + _ATOM * abs(ascending[-2]))
        return cls(ascending, inside / np.diff(ascending), near_zero, least, scheme)

    def __call__(self, low: Array | float, high: Array | float) -> Array:
        """Return the error for each range [low, high], in squared real units."""
        scale, first = self._grid(np.minimum(low, 0.0), np.maximum(high, 0.0))
        t = self.edges / scale[:, None]
        code = np.rint(t)
        np.maximum(code, first[:, None], out=code)
        np.minimum(code, first[:, None] + (self.scheme.quant_max - self.scheme.quant_min), out=code)
        t -= code
        integral = t * t
        integral *= t
        integral *= 4.0
        integral += code  # 12 * G
        result: Array = scale**3 / 12 * (np.diff(integral) @ self.density) + self.near_zero
        return result

    def _grid(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Return the scale, as `qparams.scale_of`, and the first code less the zero point."""
        scheme = self.scheme
        if scheme.symmetric:
            below = scheme.symmetric_zero_point - scheme.quant_min
            above = scheme.quant_max - scheme.symmetric_zero_point
            scale = np.maximum(high / above if above else 0.0 * high, -low / below if below else 0.0 * low)
            scale = np.maximum(scale, scheme.eps)
            return scale, np.full_like(scale, -below)
        scale = np.maximum((high - low) / (scheme.quant_max - scheme.quant_min), scheme.eps)
        return scale, np.rint(low / scale)


def _least_threshold(counts: Array, edges: Array, step: float) -> float:
    """Return the least magnitude that may be worth clipping at.

    Less than a quarter of the values that are not 0 lie beyond it, and clipping there costs less than all that
    rounding with `step` (that of min-max) can cost, step**2 / 4 per value.
    """
    lower, middle = edges[:-1], (edges[:-1] + edges[1:]) / 2
    zeros, ones, squares = np.cumsum((counts * middle ** [[0], [1], [2]])[:, ::-1], axis=1)[:, ::-1]
    clipping = squares - 2.0 * lower * ones + lower**2 * zeros
    worth = (zeros <= zeros[min(1, len(counts) - 1)] / 4) & (clipping <= counts.sum() * step**2 / 4)
    return float(lower[np.argmax(worth)] if worth.any() else lower[-1])
