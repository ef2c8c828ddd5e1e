"""The laws of `Range` and `Bounds`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantmark.observers.errors import RangeError
from quantmark.observers.ranges import UNBOUNDED, Bounds, Range, union

finite = st.floats(allow_nan=False, allow_infinity=False)
ranges = st.tuples(finite, finite).map(lambda ends: Range(min(ends), max(ends)))
ends = st.none() | st.floats(allow_nan=False)
bounds = st.tuples(ends, ends).map(
    lambda b: Bounds(*b) if None in b or b[0] <= b[1] else Bounds(b[1], b[0])  # type: ignore[operator]
)


# --- Range ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_end_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(RangeError, match="finite ends"):
        Range(bad, 1.0)
    with pytest.raises(RangeError, match="finite ends"):
        Range(0.0, bad)


def test_ends_in_the_wrong_order_are_an_error() -> None:
    with pytest.raises(RangeError, match="min <= max"):
        Range(1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_of_a_tensor_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    assert Range.of(torch.tensor([[0, -3], [2, 1]], dtype=dtype)) == Range(-3.0, 2.0)


def test_of_a_tensor_needs_no_gradient_and_leaves_the_graph_alone() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    assert Range.of(values * 2) == Range(2.0, 4.0)


def test_of_an_empty_tensor_is_an_error() -> None:
    with pytest.raises(RangeError, match="empty"):
        Range.of(torch.empty(0, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_of_a_tensor_that_holds_nan_or_inf_is_an_error(bad: float) -> None:
    with pytest.raises(RangeError):
        Range.of(torch.tensor([0.0, bad, 1.0]))


@given(ranges, ranges, ranges)
def test_union_covers_both_and_is_the_smallest_that_does(one: Range, other: Range, third: Range) -> None:
    both = one.union(other)
    assert both.covers(one)
    assert both.covers(other)
    if third.covers(one) and third.covers(other):
        assert third.covers(both)
    assert both.min in (one.min, other.min)
    assert both.max in (one.max, other.max)


@given(ranges, ranges, ranges)
def test_union_is_a_semilattice(one: Range, other: Range, third: Range) -> None:
    assert one.union() == one.union(one) == one
    assert one.union(other) == other.union(one)
    assert one.union(other).union(third) == one.union(other.union(third)) == one.union(other, third)
    assert union([one, other, third]) == one.union(other, third)


@given(ranges, ranges, ranges)
def test_covers_is_a_partial_order(one: Range, other: Range, third: Range) -> None:
    assert one.covers(one)
    if one.covers(other) and other.covers(one):
        assert one == other
    if one.covers(other) and other.covers(third):
        assert one.covers(third)


@given(ranges)
def test_with_zero_is_the_union_with_zero(range_: Range) -> None:
    assert range_.with_zero() == range_.union(Range(0.0, 0.0))
    assert range_.with_zero().with_zero() == range_.with_zero()


@given(ranges, bounds, st.floats(0.0, 1.0))
def test_clamp_is_the_range_of_the_clamped_values(range_: Range, limits: Bounds, share: float) -> None:
    if math.inf in (limits.lower, limits.upper) or -math.inf in (limits.lower, limits.upper):
        return
    clamped = range_.clamp(limits)
    value = min(max(range_.min * (1 - share) + range_.max * share, range_.min), range_.max)
    assert clamped.min <= limits.clamp(value) <= clamped.max
    assert clamped.clamp(limits) == clamped
    assert range_.clamp(UNBOUNDED) == range_


# --- Bounds ---


def test_bounds_in_the_wrong_order_or_nan_are_an_error() -> None:
    for low, high in ((1.0, 0.0), (math.nan, None), (None, math.nan), (math.nan, math.nan)):
        with pytest.raises(RangeError, match="lower <= upper"):
            Bounds(low, high)


@given(bounds, finite)
def test_clamp_agrees_with_torch(limits: Bounds, value: float) -> None:
    expected = torch.tensor(value, dtype=torch.float64)
    if limits.is_bounded:
        expected = expected.clamp(limits.lower, limits.upper)
    assert limits.clamp(value) == expected.item()


@given(bounds, bounds, finite)
def test_then_is_one_clamp_after_the_other(first: Bounds, second: Bounds, value: float) -> None:
    assert first.then(second).clamp(value) == second.clamp(first.clamp(value))


@given(bounds, bounds, bounds)
def test_then_is_associative_and_unbounded_is_its_unit(one: Bounds, other: Bounds, third: Bounds) -> None:
    assert one.then(other).then(third) == one.then(other.then(third))
    assert one.then(UNBOUNDED) == one == UNBOUNDED.then(one)
    assert one.then(one) == one


def test_is_bounded() -> None:
    assert not UNBOUNDED.is_bounded
    assert Bounds(0.0, None).is_bounded
    assert Bounds(None, 0.0).is_bounded
