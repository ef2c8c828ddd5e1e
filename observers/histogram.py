"""A histogram with logarithmic bins, and the search for the range of least squared error on it.

A bin is the sign, the exponent and the first four mantissa bits of a float32: 16 bins per octave and sign,
8192 in all, whatever the data. So there is nothing to rescale when a larger value comes, and histograms add.

The search minimizes the expected squared error of quantizing a value that is uniformly distributed within
its bin. With t = x / scale and n = clamp(round(t), first, last) the error is scale**2 * (t - n)**2. The
integral of (t - n)**2 from 0 to t is G(t) = n / 12 + (t - n)**3 / 3: every full code adds 1/12, and the
remainder, also that beyond the last code (clipping), adds a third of its cube. So the c values of a bin
[a, b] cost c * scale**3 / (b - a) * (G(b / scale) - G(a / scale)): rounding, clipping and values that vanish
in the code of 0, in one formula.
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
_ROW: Final = 128  # elements per row, whose ends decide if it holds a value of the tails
_CACHED_ROWS: Final = 1024  # rows that are converted at a time, to stay in the cache
_TAIL: Final = 16  # a tail is what lies beyond the bin that holds the 16th largest value of the sample

_TINY: Final = float(torch.finfo(torch.float32).tiny)
_MAX_CODES: Final = 4096  # schemes with more codes clip nothing: their rounding is far below any outlier
_POINTS: Final = 16  # ranges that are compared at a time
_CLOSE: Final = 1.05  # thresholds that differ by less are as good as each other: the error is flat there
_ATOM: Final = 1e-7  # relative width of a bin that holds one value only
_WINDOW: Final = 40 * _NORMAL  # bins below the largest value that matter: the squares of less are below 2**-80
_GAIN: Final = 0.01  # clipping must lower the error by 1 % (0.04 dB) to be worth its risk,
_CHANCE: Final = 0.5  # and by this over sqrt(values): rounding n values differs by chance by 1.3 / sqrt(n)


def count(values: Tensor) -> Tensor:
    """Return how many `values` (finite, any shape and float dtype) are in each bin: int64 of shape [BINS]."""
    return torch.bincount(_bins(values.reshape(-1)), minlength=BINS)


def magnitudes(start: int, stop: int) -> Array:
    """Return the lower edges of bins start..stop-1 of one sign, as magnitudes."""
    index = np.arange(start, stop)
    octave, step = np.maximum(index // _NORMAL, 1), index % _NORMAL + _NORMAL * (index >= _NORMAL)
    return np.ldexp(step.astype(np.float64), octave - 127 - (23 - _SHIFT))


def _bins(flat: Tensor) -> Tensor:
    return (flat.to(torch.float32).contiguous().view(torch.int32) >> _SHIFT).add_(_SIDE)


@dataclass(frozen=True)
class Rows:
    """A large batch, cut into rows of which the smallest and the largest value are known (as float32)."""

    flat: Tensor
    rest: Tensor  # what follows the last full row
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Rows:
        """Cut `values`, at least one row; what is left over is no row."""
        by_stride = sorted(range(values.dim()), key=values.stride, reverse=True)
        flat = values.permute(by_stride).reshape(-1)  # a view also of dense layouts like channels_last
        full = flat.numel() // _ROW * _ROW
        rows, rest = flat[:full].view(-1, _ROW), flat[full:].to(torch.float32)
        if rows.dtype == torch.float32:
            return cls(flat, rest, rows.amin(1), rows.amax(1))
        parts = (part.to(torch.float32) for part in rows.split(_CACHED_ROWS))  # torch reduces those slowly
        ends = [(part.amin(1), part.amax(1)) for part in parts]
        return cls(flat, rest, torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends]))

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
        body = count(self.flat[::stride]).mul_(stride)
        negative, positive = _first_tail_bins(body.view(2, _SIDE), stride)
        tails = self._count_beyond(-_magnitude(negative), _magnitude(positive))
        for first in (negative, positive + _SIDE):
            end = (first // _SIDE + 1) * _SIDE
            body[first:end] = tails[first:end]
        return body

    def _count_beyond(self, low: float, high: float) -> Tensor:
        """Count all values <= low or >= high, and some of the others."""
        hot = ((self.low <= low) | (self.high >= high)).nonzero()[:, 0]
        rows = self.flat[: self.low.numel() * _ROW].view(-1, _ROW).index_select(0, hot)
        return count(torch.cat((rows.view(-1).to(torch.float32), self.rest)))


def _first_tail_bins(sides: Tensor, weight: int) -> list[int]:
    """Return the bin of each side from which on it holds less than _TAIL samples; never the bin of 0."""
    beyond = sides.sum(1, keepdim=True) - sides.cumsum(1)
    return [min(bin_ + 1, _SIDE - 1) for bin_ in (beyond >= _TAIL * weight).sum(1).tolist()]


def _magnitude(bin_: int) -> float:
    """Return the lower edge of one bin, as `magnitudes`."""
    octave, step = divmod(bin_, _NORMAL)
    return math.ldexp(step + _NORMAL * (octave > 0), max(octave, 1) - 127 - (23 - _SHIFT))


def search(counts: Counts, seen: Range, scheme: Scheme) -> Range:
    """Return the range within `seen` (the exact ends) of least expected squared error; `seen` if none gains.

    First one threshold clips both ends, then (affine schemes) each end is searched with the other held.
    """
    top = max(-seen.min, seen.max)
    nothing_to_gain = seen.min == seen.max or top <= _TINY or not counts.any()
    if nothing_to_gain or scheme.quant_max - scheme.quant_min > _MAX_CODES:
        return seen
    error = ExpectedError.of(counts, seen, scheme)
    floor = error.least_threshold
    limit = _minimize(lambda t: error(np.maximum(-t, seen.min), np.minimum(t, seen.max)), floor, top)
    low, high = max(seen.min, -limit), min(seen.max, limit)
    if not scheme.symmetric and low < 0.0 < high:
        high = _minimize(lambda t: error(low, t), min(floor, seen.max / 8), seen.max)
        low = -_minimize(lambda t: error(-t, high), min(floor, -seen.min / 8), -seen.min)
        high = _minimize(lambda t: error(low, t), high / 1.2, min(high * 1.2, seen.max))
    before, after = error(np.array([seen.min, low]), np.array([seen.max, high]))
    gain = 1.0 - after / before if before else 0.0
    return Range(low, high) if gain > _GAIN + _CHANCE / math.sqrt(error.values) else seen


def percentile(counts: Counts, seen: Range, percent: float) -> Range:
    """Return the range within `seen` that leaves at most (100 - percent) % of the values beyond it at each end.

    Ends are edges of bins, the outer ones, so up to 1/16 of an octave more is kept.
    """
    total = int(counts.sum())
    allowed = int(total * (100.0 - percent) / 100.0)
    if total == 0 or allowed == 0:
        return seen
    negative, positive = counts[:_SIDE], counts[_SIDE:]  # each by growing magnitude
    rising = np.concatenate((negative[::-1], positive))  # from the lowest value to the highest
    below, above = np.cumsum(rising), np.cumsum(rising[::-1])
    low = _outer_edge(int(np.searchsorted(below, allowed, side="right")), lower=True)
    high = _outer_edge(2 * _SIDE - 1 - int(np.searchsorted(above, allowed, side="right")), lower=False)
    return Range(max(seen.min, min(low, high)), min(seen.max, max(low, high)))


def _outer_edge(place: int, *, lower: bool) -> float:
    """Return the lower or upper edge of a bin, counted from the lowest value to the highest."""
    if place < _SIDE:
        bin_ = _SIDE - 1 - place
        return -_magnitude(bin_ + 1 if lower else bin_)
    return _magnitude(place - _SIDE if lower else place - _SIDE + 1)


def _minimize(error: Callable[[Array], Array], start: float, stop: float) -> float:
    """Return where in [start, stop], positive, `error` is least: on geometric grids, each around the last's."""
    while True:
        grid = _geometric(start, stop, _POINTS)
        at = int(np.argmin(error(grid)))
        start, stop = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, _POINTS - 1)])
        if stop <= start * _CLOSE:
            return float(grid[at])


def _geometric(start: float, stop: float, points: int) -> Array:
    grid: Array = start * (stop / start) ** (np.arange(points) / (points - 1))
    grid[-1] = stop
    return grid


@dataclass(frozen=True)
class ExpectedError:
    """The expected squared error, summed over all values, as a function of the range."""

    edges: Array  # of the bins that matter, ascending; one more than densities
    density: Array  # values per real unit, but for the ends
    ends: Array  # the smallest and the largest value, each of which exists once for certain
    near_zero: float  # the error of the values so small that every candidate puts them in the code of 0
    values: float  # the number of all others
    least_threshold: float  # no magnitude below this is worth clipping at
    scheme: Scheme

    @classmethod
    def of(cls, counts: Counts, seen: Range, scheme: Scheme) -> ExpectedError:
        """Prepare the error of a histogram that has values within `seen`, its exact ends."""
        codes = scheme.quant_max - scheme.quant_min
        stop = int(counts.reshape(2, _SIDE).any(0).nonzero()[0][-1]) + 1
        start = max(stop - _WINDOW, 1)
        sides = counts.reshape(2, _SIDE)[:, start:stop].astype(np.float64)
        edges, both = magnitudes(start, stop + 1), sides[0] + sides[1]
        step = float(_grid(np.array(min(seen.min, 0.0)), np.array(max(seen.max, 0.0)), scheme)[0])
        least = min(_least_threshold(both, edges, step), max(-seen.min, seen.max))
        first = min(int(np.searchsorted(edges, least / codes / 4)), len(both) - 1)
        near_zero = float(both[:first] @ (edges[1 : first + 1] ** 2 / 3)) if first else 0.0
        inside = np.concatenate((sides[0, first:][::-1], [0.0], sides[1, first:]))
        used = slice(inside.nonzero()[0][0], inside.nonzero()[0][-1] + 1)
        outer = np.concatenate((-edges[first:][::-1], edges[first:]))[used.start : used.stop + 1]
        outer[0] = min(max(outer[0], seen.min), outer[1] - _ATOM * abs(outer[1]))
        outer[-1] = max(min(outer[-1], seen.max), outer[-2] + _ATOM * abs(outer[-2]))
        inside, values = inside[used], float(inside.sum())
        apart = [at for at, end in ((0, seen.min), (-1, seen.max)) if abs(end) >= edges[first]]
        for at in apart:
            inside[at] = max(inside[at] - 1.0, 0.0)
        ends = np.array([seen.min, seen.max])[apart]
        return cls(outer, inside / np.diff(outer), ends, near_zero, values, least, scheme)

    def __call__(self, low: Array | float, high: Array | float) -> Array:
        """Return the error for each range [low, high], in squared real units."""
        scale, first = _grid(np.minimum(low, 0.0), np.maximum(high, 0.0), self.scheme)
        last = first + (self.scheme.quant_max - self.scheme.quant_min)
        off, code = _remainder(self.edges / scale[:, None], first, last)
        integral = off * off
        integral *= off
        integral *= 4.0
        integral += code  # 12 * G
        ends, _ = _remainder(self.ends / scale[:, None], first, last)
        spread = scale**3 / 12 * (np.diff(integral) @ self.density)
        result: Array = spread + scale**2 * (ends * ends).sum(1) + self.near_zero
        return result


def _grid(low: Array, high: Array, scheme: Scheme) -> tuple[Array, Array]:
    """Return the scale and the first code less the zero point; low <= 0 <= high.

    As `qparams.scale_of`, but without headroom: that is for values that no histogram has.
    """
    if scheme.symmetric:
        below = scheme.symmetric_zero_point - scheme.quant_min
        above = scheme.quant_max - scheme.symmetric_zero_point
        scale = np.maximum(high / above if above else 0.0 * high, -low / below if below else 0.0 * low)
        scale = np.maximum(scale, scheme.eps)
        return scale, np.full_like(scale, -below)
    scale = np.maximum((high - low) / (scheme.quant_max - scheme.quant_min), scheme.eps)
    return scale, np.rint(low / scale)


def _remainder(t: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """Return t less its code, and the code; `t` is overwritten."""
    code = np.rint(t)
    np.maximum(code, first[:, None], out=code)
    np.minimum(code, last[:, None], out=code)
    t -= code
    return t, code


def _least_threshold(counts: Array, edges: Array, step: float) -> float:
    """Return the least magnitude that may be worth clipping at.

    At most a quarter of the values that are not 0 lie beyond it, and clipping there costs no more than all
    that rounding with `step`, that of min-max, can cost: step**2 / 4 per value.
    """
    lower, middle = edges[:-1], (edges[:-1] + edges[1:]) / 2
    moments = np.stack((counts, counts * middle, counts * middle * middle))
    zeros, ones, squares = moments[:, ::-1].cumsum(axis=1)[:, ::-1]
    clipping = squares - 2.0 * lower * ones + lower**2 * zeros
    worth = (zeros <= zeros[0] / 4) & (clipping <= counts.sum() * step**2 / 4)
    return float(lower[np.argmax(worth)] if worth.any() else lower[-1])
