"""The laws of the logarithmic histogram and of the range search on it, and how it compares with torchao's."""

import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor
from torchao.quantization.pt2e.observer import HistogramObserver

from quantmark.observers import histogram
from quantmark.observers.estimators import HistogramEstimator
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, Scheme, choose_qparams
from quantmark.observers.ranges import Range

SCHEMES = {
    "affine": INT8_AFFINE,
    "symmetric": INT8_SYMMETRIC,
    "uint8": Scheme(dtype=torch.uint8, quant_min=0, quant_max=255),
    "uneven": Scheme(quant_min=-128, quant_max=27, symmetric=True),
    "one-sided": INT8_SYMMETRIC.one_sided(),
    "int4": Scheme(quant_min=-8, quant_max=7),
    "floor": Scheme(eps=2.0**-6),
}
MANY_CODES = {name: s for name, s in SCHEMES.items() if s.quant_max >= 127}  # with few, clipping often gains
LAWS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "laplace": lambda n: torch.distributions.Laplace(0.0, 1.0).sample((n,)),
    "relu": lambda n: torch.randn(n).relu(),
    "exponential": lambda n: torch.empty(n).exponential_(),
    "t3": lambda n: torch.distributions.StudentT(3.0).sample((n,)),
    "t1.5": lambda n: torch.distributions.StudentT(1.5).sample((n,)),
    "uniform": lambda n: torch.rand(n) * 2 - 1,
    "silu": lambda n: torch.nn.functional.silu(3 * torch.randn(n)),
}
any_scheme = st.sampled_from(list(SCHEMES.values()))
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, st.integers(1, 50), elements=float32s)


def draw(law: str, size: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return LAWS[law](size)


def filled_by(*batches: Tensor) -> HistogramEstimator:
    estimator = HistogramEstimator()
    for batch in batches:
        estimator.update(batch)
    return estimator


def found_range(values: Tensor, scheme: Scheme) -> Range:
    found = filled_by(values).range(scheme)
    assert found is not None
    return found


def squared_error(values: Tensor, scale: float, zero_point: int, scheme: Scheme) -> float:
    exact = values.double()
    codes = (torch.round(exact / scale) + zero_point).clamp(scheme.quant_min, scheme.quant_max)
    return float((exact - (codes - zero_point) * scale).square().sum())


def range_error(values: Tensor, range_: Range, scheme: Scheme) -> float:
    qparams = choose_qparams(range_, scheme)
    return squared_error(values, qparams.scale, qparams.zero_point, scheme)


def torchao_error(values: Tensor, scheme: Scheme) -> float:
    observer = HistogramObserver(
        dtype=torch.int8,
        quant_min=scheme.quant_min,
        quant_max=scheme.quant_max,
        qscheme=scheme.qscheme,
        eps=scheme.eps,
    )
    observer(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale, zero_point = observer.calculate_qparams()
    return squared_error(values, float(scale), int(zero_point), scheme)


def model_of(values: Tensor, scheme: Scheme) -> tuple[histogram.ExpectedError, Range]:
    seen = Range.of(values)
    return histogram.ExpectedError.of(histogram.count(values).numpy(), seen, scheme), seen


# -------------------------------------------------------------------------------------------- the bins


def test_bins_are_the_top_thirteen_bits_of_a_float32() -> None:
    patterns = np.arange(histogram.BINS // 2 - 16, dtype=np.int32) << 19  # all but those of inf and NaN
    lower = patterns.view(np.float32)
    expected = np.concatenate((np.zeros(histogram.BINS // 2, np.int64), np.ones(len(lower), np.int64), np.zeros(16)))
    assert np.array_equal(histogram.count(torch.from_numpy(lower)).numpy(), expected)
    assert np.array_equal(histogram.count(torch.from_numpy(-lower)).numpy(), np.roll(expected, histogram.BINS // 2))
    assert np.array_equal(histogram.magnitudes(0, len(lower)), lower.astype(np.float64))


@given(float32s)
def test_a_value_lies_between_the_edges_of_its_bin(value: float) -> None:
    bin_ = int(histogram.count(torch.tensor([value])).argmax()) % (histogram.BINS // 2)
    low, high = histogram.magnitudes(bin_, bin_ + 2)
    assert low <= abs(value) < high


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("size", [histogram.EXACT_ELEMENTS + 1, 500_000, 1_000_003])
def test_a_large_batch_has_exact_tails_and_a_sampled_body(law: str, size: int) -> None:
    values = draw(law, size, seed=1)
    exact, found = histogram.count(values), histogram.Rows.of(values).count()
    seen = found > 0
    assert not (seen & (exact == 0)).any(), "values where there are none"
    # A tail is what less than 16 samples of 65536 lie beyond; here a quarter of that, to be sure.
    positive, true = found[histogram.BINS // 2 :], exact[histogram.BINS // 2 :]
    beyond = true.flip(0).cumsum(0).flip(0)
    rare = beyond < 4 * size / 65536
    assert torch.equal(positive[rare], true[rare])
    # Kolmogorov distance of a sample of at least 65536: below 1.95 / sqrt(65536) but for once in 1000.
    distance = (found.cumsum(0) / found.sum() - exact.cumsum(0) / exact.sum()).abs().max()
    assert float(distance) < 1.95 / math.sqrt(65536)


@pytest.mark.parametrize("shape", [(4, 64, 64, 64), (2, 96, 75, 128), (32, 8192), (262144,), (510510,)])
def test_the_sample_of_a_large_batch_misses_no_channel(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        values = torch.zeros(shape)
        values.select(axis, shape[axis] // 2).fill_(1.0)
        share = histogram.Rows.of(values).count()[histogram.BINS // 2 + 1 :].sum() / values.numel()
        assert float(share) == pytest.approx(1 / shape[axis], rel=0.1, abs=2 / 65536)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_large_batch_of_another_dtype_counts_as_its_float32(dtype: torch.dtype) -> None:
    values = draw("normal", 300_000, seed=2).to(dtype)
    assert torch.equal(histogram.Rows.of(values).count(), histogram.Rows.of(values.float()).count())
    assert histogram.Rows.of(values).ends() == (float(values.float().min()), float(values.float().max()))


def test_the_layout_of_a_large_batch_does_not_matter_much() -> None:
    values = draw("t3", 2 * 64 * 64 * 64, seed=3).view(2, 64, 64, 64)
    plain, last = (histogram.Rows.of(v).count() for v in (values, values.to(memory_format=torch.channels_last)))
    tail = histogram.BINS // 2 + (127 + 4) * 16  # from 16.0 on: 90 of 500 thousand
    assert torch.equal(plain[tail:], last[tail:])
    assert int(last.sum()) == int(plain.sum())
    strided = values[:, ::2].transpose(1, 3)
    assert histogram.Rows.of(strided).ends() == (float(strided.min()), float(strided.max()))


# ------------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("law", LAWS)
def test_the_expected_error_is_the_error(law: str, scheme: Scheme) -> None:
    values = draw(law, 100_000, seed=4)
    error, seen = model_of(values, scheme)
    for share in (1.0, 0.7, 0.4):
        range_ = Range(seen.min * share, seen.max * share)
        expected = float(error(range_.min, np.array([range_.max]))[0])
        # Rounding n values differs by chance by 0.9 / sqrt(n), 0.3 %; the rest: no bin is quite flat.
        assert expected == pytest.approx(range_error(values, range_, scheme), rel=0.06)


@given(arrays, any_scheme, st.integers(1, 10**6))
def test_the_found_range_lies_within_the_ends_and_is_no_worse(
    values: NDArray[np.float32], scheme: Scheme, weight: int
) -> None:
    tensor = torch.from_numpy(values)
    seen, counts = Range.of(tensor), histogram.count(tensor).numpy() * weight
    found = histogram.search(counts, seen, scheme)
    assert seen.covers(found)
    if found != seen:
        error = histogram.ExpectedError.of(counts, seen, scheme)
        before, after = error(np.array([seen.min, found.min]), np.array([seen.max, found.max]))
        assert after <= 0.99 * before


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("law", LAWS)
def test_no_range_of_a_dense_grid_is_much_better(law: str, scheme: Scheme) -> None:
    values = draw(law, 100_000, seed=5)
    error, seen = model_of(values, scheme)
    found = found_range(values, scheme)
    lows = seen.min * np.geomspace(1e-3, 1, 80) if seen.min < 0 else np.array([seen.min])
    highs = seen.max * np.geomspace(1e-3, 1, 80)
    best = min(float(error(low, highs).min()) for low in lows)
    assert float(error(found.min, np.array([found.max]))[0]) <= 1.013 * best  # 0.05 dB


@pytest.mark.parametrize("scheme", [INT8_AFFINE, INT8_SYMMETRIC], ids=["affine", "symmetric"])
@pytest.mark.parametrize("law", LAWS)
def test_sqnr_is_at_least_that_of_torchao_and_of_min_max(law: str, scheme: Scheme) -> None:
    losses = []
    for seed in range(3):
        values = draw(law, 50_000, seed)
        ours = range_error(values, found_range(values, scheme), scheme)
        assert ours <= range_error(values, Range.of(values), scheme) * 1.01  # 0.04 dB
        losses.append(10 * math.log10(ours / torchao_error(values, scheme)))
    assert max(losses) < 0.05
    assert sum(losses) / len(losses) < 0.01


@pytest.mark.parametrize(("law", "at_least"), [("normal", 1.0), ("laplace", 1.5), ("exponential", 0.8), ("t3", 3.0)])
def test_clipping_a_million_values_gains(law: str, at_least: float) -> None:
    values = draw(law, 1_000_000, seed=6)
    gain = range_error(values, Range.of(values), INT8_AFFINE) / range_error(
        values, found_range(values, INT8_AFFINE), INT8_AFFINE
    )
    assert 10 * math.log10(gain) > at_least


def test_a_symmetric_law_is_clipped_symmetrically() -> None:
    found = found_range(draw("laplace", 1_000_000, seed=7), INT8_SYMMETRIC)
    assert found.min == -found.max
    # Banner, Nahshan, Soudry 2019, "Post training 4-bit quantization": 9.89 b for 8 bits.
    assert found.max == pytest.approx(9.9, rel=0.1)


def test_one_outlier_among_many_is_clipped_and_among_few_is_kept() -> None:
    values = torch.cat((draw("normal", 99_999, seed=8), torch.tensor([4000.0])))
    estimator = filled_by(values)
    # (4000 - T)**2 for one value costs more than the noise of all others, which is their variance at most.
    assert estimator.range(INT8_AFFINE) == Range.of(values)
    many = HistogramEstimator()
    many.load_state_dict(estimator.state_dict())
    many.counts *= 10_000  # a thousand million values, ten thousand outliers
    many.counts[histogram.BINS // 2 + (127 + 11) * 16 :].clamp_(max=1)  # of which one is left
    found = many.range(INT8_AFFINE)
    assert found is not None
    assert found.max < 500.0
    assert found.min == pytest.approx(float(values.min()), rel=0.2)


@pytest.mark.parametrize("scheme", MANY_CODES.values(), ids=MANY_CODES)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.zeros(100), id="zero"),
        pytest.param(torch.full((100,), 3.7), id="constant"),
        pytest.param(torch.tensor([-2.5]), id="one element"),
        pytest.param(torch.tensor([0.0, 6.0]).repeat(1000), id="two values"),
        pytest.param(torch.tensor([-0.0, 0.0]), id="minus zero"),
        pytest.param(torch.tensor([-3e-45, 0.0, 1e-40]), id="denormal"),
        pytest.param(torch.tensor([-3e38, 3e38]).repeat(10), id="huge"),
        pytest.param((torch.arange(100_000) % 256) / 255, id="pixels"),
        pytest.param(torch.linspace(-1, 1, 100_000), id="uniform"),
    ],
)
def test_where_clipping_gains_nothing_the_range_is_min_max(values: Tensor, scheme: Scheme) -> None:
    assert found_range(values, scheme) == Range.of(values)


def test_sixteen_bits_are_never_clipped() -> None:
    values = draw("t1.5", 100_000, seed=9)
    assert found_range(values, INT16_SYMMETRIC) == Range.of(values)


def test_a_search_takes_a_millisecond() -> None:
    estimator = filled_by(draw("t1.5", 1_000_000, seed=10))
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        estimator.range(INT8_AFFINE)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2e-3  # 0.6 ms on an idle core
