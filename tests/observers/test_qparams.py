"""The laws of `choose_qparams`: cover, activation contract, agreement with torch and channel by channel."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from quantmark.observers.errors import ConfigError, RangeError
from quantmark.observers.qparams import (
    INT8_AFFINE,
    INT8_SYMMETRIC,
    INT16_SYMMETRIC,
    QParams,
    Scheme,
    choose_channel_qparams,
    choose_qparams,
    scale_of,
    sharing_loss_db,
)
from quantmark.observers.ranges import UNBOUNDED, Bounds, Range

ULP = 2.0**-24  # what rounding to float32 may change a scale by, as a share of it


def restricted(dtype: torch.dtype, first: int, last: int) -> Scheme:
    return Scheme(dtype=dtype, quant_min=min(first, last), quant_max=max(first, last))


UINT8 = Scheme(dtype=torch.uint8, quant_min=0, quant_max=255)
INT16 = Scheme(dtype=torch.int16, quant_min=-32768, quant_max=32767)
FLOORED = Scheme(eps=2.0**-12)
affine = st.sampled_from([INT8_AFFINE, UINT8, INT16, FLOORED, Scheme(headroom=1.25)]) | st.builds(
    restricted, st.just(torch.int8), st.integers(-128, -1), st.integers(0, 127)
)
symmetric = st.sampled_from([INT8_SYMMETRIC, INT16_SYMMETRIC, replace(INT16_SYMMETRIC, headroom=2.0)]) | st.builds(
    lambda low, high: Scheme(quant_min=low, quant_max=high, symmetric=True),
    st.integers(-128, -1),
    st.integers(1, 127),
)
schemes = affine | symmetric

magnitudes = st.floats(-1e30, 1e30) | st.floats(-10.0, 10.0) | st.floats(-1e-37, 1e-37) | st.just(0.0)
ranges = st.tuples(magnitudes, magnitudes).map(lambda ends: Range(min(ends), max(ends)))
LOWER = st.sampled_from([None, 0.0, -1.0, -0.5])
UPPER = st.sampled_from([None, 0.0, 6.0, 1.0, 0.3])
bounds = st.builds(Bounds, LOWER, UPPER)


def step_share(scheme: Scheme) -> float:
    """Half a step, and what float32 rounding of the scale may add, in steps."""
    return 0.5 + (scheme.quant_max - scheme.quant_min) * ULP + 1e-6


def on_floor(qparams: QParams) -> bool:
    return qparams.scale <= qparams.scheme.eps


# --- cover ---


@given(ranges, schemes)
def test_no_value_saturates_by_more_than_half_a_step(range_: Range, scheme: Scheme) -> None:
    qparams = choose_qparams(range_, scheme)
    slack = qparams.scale * step_share(scheme)
    assert qparams.representable.min - slack <= range_.min
    assert range_.max <= qparams.representable.max + slack
    assert qparams.covers(range_)


@given(ranges, schemes, bounds)
def test_zero_is_exact(range_: Range, scheme: Scheme, limits: Bounds) -> None:
    qparams = choose_qparams(range_, scheme, limits)
    assert scheme.quant_min <= qparams.zero_point <= scheme.quant_max
    assert isinstance(qparams.zero_point, int)


@given(ranges, schemes)
def test_scale_is_a_float32_at_or_above_the_floor(range_: Range, scheme: Scheme) -> None:
    scale = choose_qparams(range_, scheme).scale
    assert scale == torch.tensor(scale, dtype=torch.float64).float().item()
    assert scale >= scheme.eps


@given(ranges, schemes)
def test_no_code_is_wasted(range_: Range, scheme: Scheme) -> None:
    """A range is never given a scale that is larger than it needs, but for the floor and rounding."""
    qparams = choose_qparams(range_, scheme)
    seen = range_.with_zero()
    assume(not on_floor(qparams) and seen.min != seen.max)
    zero = scheme.symmetric_zero_point
    if scheme.symmetric:
        need = max(seen.max / (scheme.quant_max - zero), -seen.min / (zero - scheme.quant_min))
    else:
        need = (seen.max - seen.min) / (scheme.quant_max - scheme.quant_min)
    assert qparams.scale == pytest.approx(need * scheme.headroom, rel=2 * ULP)


@given(ranges, ranges, schemes)
def test_scale_grows_with_the_range(one: Range, other: Range, scheme: Scheme) -> None:
    both = one.union(other)
    assert scale_of(both, scheme) >= max(scale_of(one, scheme), scale_of(other, scheme))
    if both.with_zero() != Range(0.0, 0.0):
        assert choose_qparams(both, scheme).scale == scale_of(both, scheme)


def test_cover_at_a_tie_of_both_roundings() -> None:
    """Found by search: the zero point is rounded by half a step, and the scale down to float32."""
    range_ = Range(-0.4, 0.4)
    assert choose_qparams(range_, INT8_AFFINE).covers(range_)


@given(st.floats(0.0, 1e30), st.sampled_from([INT8_SYMMETRIC, INT16_SYMMETRIC]))
def test_one_sided_symmetric_codes_cover_what_is_never_negative(high: float, scheme: Scheme) -> None:
    qparams = choose_qparams(Range(0.0, high), scheme.one_sided())
    assert qparams.zero_point == qparams.scheme.quant_min == 0
    assert qparams.covers(Range(0.0, high))
    assert qparams.honours(Bounds(0.0, None))


# --- activation contract ---


@given(ranges, affine, st.builds(Bounds, st.just(0.0), UPPER))
def test_zero_point_is_the_first_code_below_a_relu(range_: Range, scheme: Scheme, limits: Bounds) -> None:
    assert choose_qparams(range_, scheme, limits).zero_point == scheme.quant_min


@given(ranges, affine, bounds)
def test_saturation_is_the_clamp(range_: Range, scheme: Scheme, limits: Bounds) -> None:
    qparams = choose_qparams(range_, scheme, limits)
    assume(not on_floor(qparams) and limits != Bounds(0.0, 0.0))
    slack = qparams.scale * step_share(scheme)
    if limits.upper is not None:
        assert qparams.representable.max <= limits.upper + slack
    if limits.lower is not None:
        assert qparams.representable.min >= limits.lower - slack
    assert qparams.honours(limits)


@given(ranges, schemes, bounds)
def test_bounded_values_are_covered(range_: Range, scheme: Scheme, limits: Bounds) -> None:
    assert choose_qparams(range_, scheme, limits).covers(range_.clamp(limits))


@given(ranges, affine, bounds)
def test_clamped_values_have_the_same_qparams(range_: Range, scheme: Scheme, limits: Bounds) -> None:
    """It makes no difference whether the observer sat before the activation or after it."""
    after = choose_qparams(range_.clamp(limits), scheme, limits)
    assert choose_qparams(range_, scheme, limits) == after


def test_honours_tells_what_breaks_a_contract() -> None:
    relu, relu6 = Bounds(0.0, None), Bounds(0.0, 6.0)
    assert choose_qparams(Range(0.0, 6.0), INT8_AFFINE).honours(relu6)
    assert not choose_qparams(Range(-1.0, 6.0), INT8_AFFINE).honours(relu)
    assert not choose_qparams(Range(0.0, 8.0), INT8_AFFINE).honours(relu6)
    assert not choose_qparams(Range(0.0, 6.0), INT8_SYMMETRIC).honours(relu)
    assert not choose_qparams(Range(0.0, 5.0), Scheme(eps=1.0)).honours(relu6)
    assert QParams(1.0, 0, INT8_AFFINE).honours(UNBOUNDED)


# --- edges ---


@pytest.mark.parametrize("scheme", [INT8_AFFINE, UINT8, INT16])
def test_a_tensor_that_is_0_throughout_gets_the_scale_of_0_to_1(scheme: Scheme) -> None:
    codes = scheme.quant_max - scheme.quant_min
    zero = Range(0.0, 0.0)
    assert choose_qparams(zero, scheme).scale == pytest.approx(1.0 / codes, rel=ULP)
    assert choose_qparams(zero, scheme, Bounds(0.0, 0.3)).scale == pytest.approx(0.3 / codes, rel=ULP)
    assert choose_qparams(Range(-5.0, -1.0), scheme, Bounds(0.0, None)) == choose_qparams(zero, scheme)
    assert choose_qparams(zero, scheme, Bounds(None, 0.0)) == choose_qparams(Range(-1.0, 0.0), scheme)
    assert choose_qparams(zero, INT8_SYMMETRIC).scale == pytest.approx(1.0 / 127, rel=ULP)


def test_values_far_below_the_floor_take_the_floor() -> None:
    assert choose_qparams(Range(-1e-9, 1e-9), FLOORED) == QParams(2.0**-12, -128, FLOORED)


def test_no_floor_destroys_small_weights() -> None:
    assert choose_qparams(Range(-6e-5, 6e-5), INT8_SYMMETRIC).scale == pytest.approx(6e-5 / 127, rel=ULP)


def test_a_range_too_wide_for_float32_is_an_error() -> None:
    with pytest.raises(RangeError, match="too wide"):
        choose_qparams(Range(-1e300, 0.0), INT8_AFFINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "integer dtype"),
        ({"dtype": torch.bool}, "integer dtype"),
        ({"quant_min": -129}, "holds codes -128..127"),
        ({"quant_min": 5, "quant_max": 5}, "quant_min < quant_max"),
        ({"eps": 0.0}, "eps must be a normal float32"),
        ({"eps": 1e-40}, "eps must be a normal float32"),
        ({"eps": 1e39}, "eps must be a normal float32"),
        ({"eps": math.nan}, "eps must be a normal float32"),
        ({"quant_min": 1, "symmetric": True}, "zero point 0 among the codes"),
    ],
)
def test_a_scheme_that_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheme(**options)


# --- agreement ---


@given(st.lists(ranges, min_size=1, max_size=8), schemes)
def test_channels_have_the_numbers_of_choose_qparams(members: list[Range], scheme: Scheme) -> None:
    low = torch.tensor([r.min for r in members], dtype=torch.float64)
    high = torch.tensor([r.max for r in members], dtype=torch.float64)
    scales, zero_points = choose_channel_qparams(low, high, scheme)
    assert (scales.dtype, zero_points.dtype) == (torch.float32, torch.int64)
    alive = [i for i, r in enumerate(members) if r.with_zero() != Range(0.0, 0.0)]
    for i in alive:
        expected = choose_qparams(members[i], scheme)
        assert (scales[i].item(), zero_points[i].item()) == (expected.scale, expected.zero_point)
    for i in set(range(len(members))) - set(alive):
        dead = choose_qparams(members[i], scheme)
        assert scales[i].item() == (max(scales[j].item() for j in alive) if alive else dead.scale)
        assert zero_points[i].item() == dead.zero_point


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_channel_that_is_not_finite_or_too_wide_is_an_error(bad: float) -> None:
    low, high = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, bad], dtype=torch.float64)
    for scheme in (INT8_AFFINE, INT8_SYMMETRIC):
        with pytest.raises(RangeError, match="channel"):
            choose_channel_qparams(low, high, scheme)


@given(st.floats(-100, 100), st.floats(-100, 100), st.sampled_from([INT8_AFFINE, UINT8, INT8_SYMMETRIC]))
def test_torch_reproduces_values_within_half_a_step(one: float, other: float, scheme: Scheme) -> None:
    range_ = Range(min(one, other), max(one, other))
    qparams = choose_qparams(range_, scheme)
    assume(qparams.scale > 1e-30)
    values = torch.linspace(range_.min, range_.max, 257, dtype=torch.float32)
    back = torch.fake_quantize_per_tensor_affine(
        values, qparams.scale, qparams.zero_point, scheme.quant_min, scheme.quant_max
    )
    assert (back - values).abs().max().item() <= qparams.scale * (0.5 + 1e-4)


@given(st.floats(1e-30, 1e30), st.floats(1e-3, 1e3))
def test_sharing_loss_is_20_log10_of_the_ratio(own: float, ratio: float) -> None:
    assert sharing_loss_db(own, own) == 0.0
    assert sharing_loss_db(own, 2 * own) == pytest.approx(6.0206, abs=1e-4)
    assert sharing_loss_db(own, own * ratio) == pytest.approx(-sharing_loss_db(own * ratio, own), abs=1e-9)


@pytest.mark.parametrize("scheme", [INT8_AFFINE, INT16_SYMMETRIC])
def test_headroom_reaches_further_than_the_range(scheme: Scheme) -> None:
    seen = Range(-1.0, 3.0)
    plain, roomy = choose_qparams(seen, scheme), choose_qparams(seen, replace(scheme, headroom=2.0))
    assert roomy.scale == pytest.approx(2 * plain.scale)
    assert roomy.covers(Range(-1.0, 5.0))
    assert roomy.zero_point == (0 if scheme.symmetric else -128 + round(1.0 / roomy.scale))


@pytest.mark.parametrize("scheme", [INT8_AFFINE, INT16_SYMMETRIC])
def test_there_is_no_headroom_beyond_an_activation(scheme: Scheme) -> None:
    bounds = Bounds(-2.0, 2.0)
    roomy = choose_qparams(Range(-5.0, 5.0), replace(scheme, headroom=2.0), bounds)
    assert roomy.honours(bounds)
    assert roomy.scale == choose_qparams(Range(-5.0, 5.0), scheme, bounds).scale


@pytest.mark.parametrize(("given", "used"), [(None, 2.0), (1.25, 1.25), (1.0, 1.0), (4.0, 2.0)])
def test_a_tensor_can_have_less_headroom_than_its_scheme(given: float | None, used: float) -> None:
    roomy = replace(INT16_SYMMETRIC, headroom=2.0)
    found = choose_qparams(Range(-1.0, 3.0), roomy, headroom=given)
    assert found.scale == pytest.approx(3.0 * used / 32767)
    assert found.scheme == roomy


@pytest.mark.parametrize("headroom", [0.5, 17.0, float("nan")])
def test_headroom_is_a_small_factor(headroom: float) -> None:
    with pytest.raises(ConfigError, match="headroom"):
        Scheme(headroom=headroom)
