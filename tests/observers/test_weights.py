"""The search for weight ranges: never worse than exact ends, better where channels are short."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, Scheme, choose_channel_qparams
from quantmark.observers.weights import channel_ranges

INT4 = Scheme(quant_min=-7, quant_max=7, symmetric=True)
GAINS = [(9, 0.0, 2.2), (27, 0.0, 0.9), (144, 0.0, 0.15), (9, 0.5**0.5, 3.4), (27, 0.5**0.5, 2.3), (144, 0.5**0.5, 1.7)]
FULL = Scheme(quant_min=-128, quant_max=127, symmetric=True)
FLOORED = Scheme(quant_min=-127, quant_max=127, symmetric=True, eps=2.0**-12)


def errors(values: Tensor, scheme: Scheme, *, search: bool, mean: float = 0.5**0.5) -> Tensor:
    """Expected squared error of each output channel, on inputs of variance 1 and mean `mean`; in double precision."""
    scale, zero = choose_channel_qparams(*channel_ranges(values, scheme, search=search), scheme)
    step, exact = scale.double()[:, None], values.double()
    codes = torch.round(exact / step + zero[:, None]).clamp(scheme.quant_min, scheme.quant_max)
    off = (codes - zero[:, None]) * step - exact
    return (off**2).sum(1) + (mean * off.sum(1)) ** 2


@given(
    values=arrays("float32", st.tuples(st.integers(1, 5), st.integers(1, 30)), elements=st.floats(-4, 4, width=32)),
    magnitude=st.integers(-30, 30),
    scheme=st.sampled_from([INT8_SYMMETRIC, INT4, FULL, FLOORED]),
)
def test_search_is_never_worse_than_exact_ends(values: object, magnitude: int, scheme: Scheme) -> None:
    weights = torch.as_tensor(values) * 2.0**magnitude
    exact = errors(weights, scheme, search=False)
    searched = errors(weights, scheme, search=True)
    rounding = 1e-5 * weights.double().square().sum(1) * 2.0**-16  # of the comparison in single precision
    assert bool((searched <= exact * (1 + 1e-4) + rounding).all())


@pytest.mark.parametrize(("count", "mean", "gain_db"), GAINS)
def test_search_gains_on_random_weights(count: int, mean: float, gain_db: float) -> None:
    weights = torch.randn(400, count, generator=torch.Generator().manual_seed(0))
    exact, searched = (errors(weights, INT8_SYMMETRIC, search=search, mean=mean) for search in (False, True))
    assert 10 * torch.log10(exact.sum() / searched.sum()) > gain_db


def test_dead_channels_are_left_alone() -> None:
    weights = torch.stack([torch.zeros(9), torch.linspace(-1, 1, 9), torch.zeros(9)])
    low, high = channel_ranges(weights, INT8_SYMMETRIC, search=True)
    assert low[[0, 2]].tolist() == high[[0, 2]].tolist() == [0.0, 0.0]
    scale, _ = choose_channel_qparams(low, high, INT8_SYMMETRIC)
    assert scale[0] == scale[1] == scale[2]
    assert errors(weights, INT8_SYMMETRIC, search=True)[[0, 2]].tolist() == [0.0, 0.0]


def test_a_channel_does_not_depend_on_its_neighbours() -> None:
    weights = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    low, high = channel_ranges(weights, INT8_SYMMETRIC, search=True)
    for row in range(4):
        alone = channel_ranges(weights[row : row + 1], INT8_SYMMETRIC, search=True)
        assert (float(alone[0]), float(alone[1])) == (float(low[row]), float(high[row]))


@pytest.mark.parametrize(
    ("scheme", "count", "search"),
    [
        (INT8_AFFINE, 9, True),  # a zero point of its own would move with the scale
        (INT16_SYMMETRIC, 9, True),  # nothing to gain
        (INT8_SYMMETRIC, 1025, True),  # would take long
        (INT8_SYMMETRIC, 9, False),
    ],
)
def test_elsewhere_the_ends_are_exact(scheme: Scheme, count: int, search: bool) -> None:
    weights = torch.randn(3, count)
    low, high = channel_ranges(weights, scheme, search=search)
    assert torch.equal(low, weights.amin(1))
    assert torch.equal(high, weights.amax(1))


def test_factors_stay_near_one() -> None:
    weights = torch.randn(200, 9)
    low, high = channel_ranges(weights, INT8_SYMMETRIC, search=True)
    factor = high / weights.amax(1)
    assert 0.9949 < float(factor.min()) <= float(factor.max()) < 1.1001
    assert torch.allclose(low, weights.amin(1) * factor)
