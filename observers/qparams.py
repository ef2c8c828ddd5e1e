"""Scale and zero point: the one place where they are computed.

The rules are the usual ones of uniform affine quantization (Jacob et al. 2018, "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 2.1):

    real = scale * (code - zero_point)

Two laws hold for every range, scheme and bounds, and are property-tested:

* cover: saturation moves no value of the range further than half a step, which is what rounding may cost;
* activation contract: in an affine scheme, where the bounds have lower == 0, zero_point == quant_min; where
  they have an upper end u >= 0, the largest representable value is at most u + step / 2. So saturation *is*
  the clamp.

"Half a step" is up to the rounding of the scale to float32: 2**-24 of the whole range, nothing for 8 bits.
The floor of the scale goes before the upper bound: with eps > u / (quant_max - quant_min), u is exceeded.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Final

import torch

from .errors import ConfigError, RangeError
from .fields import check_fields
from .ranges import UNBOUNDED, Bounds, Range

_UNIT: Final = Range(0.0, 1.0)  # stands in for a tensor that is 0 throughout: harmless to any kernel
_MOST_HEADROOM: Final = 16.0
DTYPES: Final = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
_FLOAT32: Final = struct.Struct("<f")
_FLOAT32_TINY: Final = float(torch.finfo(torch.float32).tiny)
_FLOAT32_MAX: Final = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one tensor is turned into integers.

    Args:
        dtype: the integer type of the codes.
        quant_min: the smallest code that may be used.
        quant_max: the largest code that may be used.
        symmetric: zero_point is 0 (the middle code where `dtype` is unsigned) instead of being chosen.
        eps: the floor of the scale, in real units. A range that needs a smaller scale loses resolution.
        headroom: how much further than the range the codes reach, a factor >= 1: for values that calibration did not
            see. Where an activation bounds the tensor there is none.

    Raises:
        ConfigError: if the codes don't fit the dtype, or the floor is not a positive normal float32.
    """

    dtype: torch.dtype = torch.int8
    quant_min: int = -128
    quant_max: int = 127
    symmetric: bool = False
    eps: float = _FLOAT32_TINY
    headroom: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "scheme")
        if self.dtype not in DTYPES:
            listed = ", ".join(str(each) for each in DTYPES)
            raise ConfigError(f"a scheme needs an integer dtype that torch quantizes to ({listed}), got {self.dtype}")
        info = torch.iinfo(self.dtype)
        if not info.min <= self.quant_min < self.quant_max <= info.max:
            raise ConfigError(
                f"{self.dtype} holds codes {info.min}..{info.max} with quant_min < quant_max, "
                f"got {self.quant_min}..{self.quant_max}"
            )
        if not _FLOAT32_TINY <= self.eps <= _FLOAT32_MAX:
            raise ConfigError(f"eps must be a normal float32 (>= {_FLOAT32_TINY:.4g}), got {self.eps}")
        if not 1.0 <= self.headroom <= _MOST_HEADROOM:
            raise ConfigError(f"headroom must be between 1 and {_MOST_HEADROOM:g}, got {self.headroom}")
        if not self.quant_min <= self.symmetric_zero_point <= self.quant_max and self.symmetric:
            raise ConfigError(
                f"a symmetric scheme needs its zero point {self.symmetric_zero_point} among the codes "
                f"{self.quant_min}..{self.quant_max}"
            )

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point that a symmetric scheme uses."""
        info = torch.iinfo(self.dtype)
        return 0 if info.min < 0 else (info.max + 1) // 2

    @property
    def qscheme(self) -> torch.qscheme:
        """The per-tensor torch.qscheme."""
        return torch.per_tensor_symmetric if self.symmetric else torch.per_tensor_affine

    @property
    def channel_qscheme(self) -> torch.qscheme:
        """The per-channel torch.qscheme."""
        return torch.per_channel_symmetric if self.symmetric else torch.per_channel_affine

    def one_sided(self) -> Scheme:
        """Return the scheme for a tensor that is never negative: codes from the symmetric zero point up."""
        return replace(self, quant_min=self.symmetric_zero_point)


LARGEST_VALUE: Final = 1e32
"""Beyond it a value is no measurement and gets no qparams: masks use the smallest float, -3.4e38."""

INT8_AFFINE: Final = Scheme()
INT8_SYMMETRIC: Final = Scheme(quant_min=-127, symmetric=True)
INT32: Final = Scheme(dtype=torch.int32, quant_min=-(2**31), quant_max=2**31 - 2, symmetric=True)
INT16_SYMMETRIC: Final = Scheme(dtype=torch.int16, quant_min=-32767, quant_max=32767, symmetric=True)


@dataclass(frozen=True)
class QParams:
    """The quantization parameters of one tensor: real = scale * (code - zero_point)."""

    scale: float
    zero_point: int
    scheme: Scheme

    @property
    def representable(self) -> Range:
        """The range from the smallest to the largest real value that has a code."""
        return Range(
            self.scale * (self.scheme.quant_min - self.zero_point),
            self.scale * (self.scheme.quant_max - self.zero_point),
        )

    @property
    def _slack(self) -> float:
        """Half a step, and what the rounding of the scale to float32 adds up to over all codes."""
        codes = self.scheme.quant_max - self.scheme.quant_min
        return self.scale * (0.5 + codes * 2.0**-24 + 1e-6)

    def covers(self, range_: Range) -> bool:
        """Tell whether no value of `range_` saturates by more than half a step."""
        limits, slack = self.representable, self._slack
        return limits.min - slack <= range_.min and range_.max <= limits.max + slack

    def honours(self, bounds: Bounds) -> bool:
        """Tell whether saturation at the first and last code is the clamp that `bounds` stands for.

        Only a lower end of exactly 0 can be a saturation at the first code that also keeps 0 exact; other
        ends must agree with the last (or first) representable value within half a step.
        """
        limits, slack = self.representable, self._slack
        if bounds.lower == 0.0:
            lower_ok = self.zero_point == self.scheme.quant_min
        else:
            lower_ok = bounds.lower is None or limits.min >= bounds.lower - slack
        return lower_ok and (bounds.upper is None or limits.max <= bounds.upper + slack)


def choose_qparams(range_: Range, scheme: Scheme, bounds: Bounds = UNBOUNDED, headroom: float | None = None) -> QParams:
    """Return the qparams that spend every code of `scheme` on `range_`, clamped to `bounds`, and on 0.

    `headroom` takes the place of the scheme's where it is less.

    The scale is rounded to float32, the type that every backend stores. A tensor that is 0 throughout gets
    the qparams of [0, 1], cut at the bounds, so that no kernel meets a ratio of scales beyond its limits.
    """
    seen = range_.clamp(bounds).with_zero()
    if seen.min == seen.max:
        seen = _stand_in(bounds)
    return _at_scale(seen, scheme, scale_of(seen, scheme, 1.0 if bounds.is_bounded else headroom))


def coarser_qparams(range_: Range, scheme: Scheme, bounds: Bounds, scale: float) -> QParams:
    """Return the qparams of a given scale, at least that of `choose_qparams`, that begin where the range does."""
    return _at_scale(range_.clamp(bounds).with_zero(), scheme, scale)


def _at_scale(range_: Range, scheme: Scheme, scale: float) -> QParams:
    if scheme.symmetric:
        return QParams(scale, scheme.symmetric_zero_point, scheme)
    zero_point = scheme.quant_min - round(range_.min / scale)
    return QParams(scale, min(max(zero_point, scheme.quant_min), scheme.quant_max), scheme)


def _stand_in(bounds: Bounds) -> Range:
    """Return the range that stands in for all zeros: [0, 1] or, where it can't be positive, [-1, 0]."""
    upper, lower = _UNIT.clamp(bounds), Range(-_UNIT.max, 0.0).clamp(bounds)
    if upper.max > 0.0:
        return upper
    return lower if lower.min < 0.0 else _UNIT


def scale_of(range_: Range, scheme: Scheme, headroom: float | None = None) -> float:
    """Return the scale, in real units per code, that `scheme` needs to cover `range_` and 0.

    `headroom` takes the place of the scheme's where it is less.
    """
    low, high = min(range_.min, 0.0), max(range_.max, 0.0)
    if scheme.symmetric:
        zero = scheme.symmetric_zero_point
        above, below = scheme.quant_max - zero, zero - scheme.quant_min
        scale = max(high / above if above else 0.0, -low / below if below else 0.0)
    else:
        scale = high / (scheme.quant_max - scheme.quant_min) - low / (scheme.quant_max - scheme.quant_min)
    factor = scheme.headroom if headroom is None else min(headroom, scheme.headroom)
    return max(_to_float32(scale * factor), _to_float32(scheme.eps))


def choose_channel_qparams(low: torch.Tensor, high: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale (float32) and zero_point (int64), each of shape [channels], for ranges [low, high].

    Channel by channel the same numbers as `choose_qparams`, but for channels that are 0 throughout: they take
    the largest scale among the others (their codes are 0 at any scale), to keep the ratios of scales small.
    """
    low = low.detach().to(torch.float64).clamp(max=0.0)
    high = high.detach().to(torch.float64).clamp(min=0.0)
    if scheme.symmetric:
        zero = scheme.symmetric_zero_point
        above, below = scheme.quant_max - zero, zero - scheme.quant_min
        scale = torch.maximum(
            high / above if above else torch.zeros_like(high),
            -low / below if below else torch.zeros_like(low),
        )
    else:
        codes = scheme.quant_max - scheme.quant_min
        scale = high / codes - low / codes
    scale = (scale * scheme.headroom).to(torch.float32).clamp(min=_to_float32(scheme.eps))
    if not bool(torch.isfinite(scale).all()):
        raise RangeError("a channel's range is NaN, infinite, or too wide for a float32 scale")
    dead = high == low
    if bool(dead.any()):
        alive = scale[~dead]
        fallback = alive.max() if alive.numel() else scale.new_tensor(scale_of(_UNIT, scheme))
        scale = torch.where(dead, fallback, scale)
    if scheme.symmetric:
        return scale, torch.full_like(scale, scheme.symmetric_zero_point, dtype=torch.int64)
    zero_point = scheme.quant_min - torch.round(low / scale.to(torch.float64))
    return scale, zero_point.clamp(scheme.quant_min, scheme.quant_max).to(torch.int64)


def sharing_loss_db(own: float, shared: float, through: float = 0.0) -> float:
    """Return 20*log10(shared / own), in dB: how much a member's quantization noise grows by sharing.

    `own` and `shared` are scales. Quantization noise has power scale**2 / 12 (Bennett 1948), so the ratio of
    powers depends on the scales alone; 6.02 dB is one bit. Values that are rounded to another scale before
    (`through`) have the noise of both: 10*log10((shared**2 + through**2) / own**2).
    """
    return 20.0 * math.log10(math.hypot(shared, through) / own)


def _to_float32(value: float) -> float:
    try:
        return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])
    except OverflowError:
        raise RangeError(f"a scale of {value:.4g} does not fit float32: the range is too wide") from None
