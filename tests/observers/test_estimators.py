"""The laws of the estimators: exact ends, order, splits, merging, filling, bad values, and their state."""

import copy
import io
import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor
from torchao.quantization.pt2e.observer import MovingAverageMinMaxObserver

from quantmark.observers.errors import ConfigError
from quantmark.observers.estimators import (
    Estimator,
    HistogramEstimator,
    MinMaxEstimator,
    MovingAverageEstimator,
)
from quantmark.observers.qparams import INT8_AFFINE
from quantmark.observers.ranges import Range

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ESTIMATORS = [MinMaxEstimator, MovingAverageEstimator, HistogramEstimator]
MERGEABLE = [MinMaxEstimator, HistogramEstimator]
every_estimator = pytest.mark.parametrize("kind", ESTIMATORS)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
batches = st.lists(hnp.arrays(np.float32, st.integers(1, 30), elements=float32s), min_size=1, max_size=6)


def after(estimator: Estimator, *values: Tensor) -> Estimator:
    for batch in values:
        estimator.update(batch)
    return estimator


def same_state(one: Estimator, other: Estimator) -> bool:
    buffers = dict(other.named_buffers())
    return all(torch.equal(buffer, buffers[name]) for name, buffer in one.named_buffers())


# ----------------------------------------------------------------------------------- exact min and max


@given(batches)
def test_min_max_is_exact(values: list[NDArray[np.float32]]) -> None:
    for kind in MERGEABLE:
        estimator = after(kind(), *map(torch.from_numpy, values))
        everything = np.concatenate(values)
        assert estimator.min_val.item() == everything.min()
        assert estimator.max_val.item() == everything.max()
    assert after(MinMaxEstimator(), *map(torch.from_numpy, values)).range(INT8_AFFINE) == Range(
        float(everything.min()), float(everything.max())
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", MERGEABLE)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 40, 40), (3, 70_001), (2, 64, 40, 40)])
def test_min_max_is_exact_in_every_dtype_and_shape(
    kind: type[Estimator], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    values = (100 * torch.randn(shape)).to(dtype)
    views = [values, values.to(memory_format=torch.channels_last)] if values.dim() == 4 else [values]
    for view in [*views, values.expand(2, *shape), values.unsqueeze(-1).expand(*shape, 2)[..., 1]]:
        estimator = after(kind(), view)
        assert estimator.min_val.item() == values.min().to(torch.float32).item()
        assert estimator.max_val.item() == values.max().to(torch.float32).item()
        assert estimator.min_val.dtype == torch.float32


@given(batches, st.randoms(use_true_random=False))
def test_order_and_split_of_batches_do_not_matter(values: list[NDArray[np.float32]], random: Random) -> None:
    for kind in MERGEABLE:
        whole = after(kind(), torch.from_numpy(np.concatenate(values)))
        shuffled = list(values)
        random.shuffle(shuffled)
        parts = after(kind(), *map(torch.from_numpy, shuffled))
        assert same_state(whole, parts)
        assert whole.range(INT8_AFFINE) == parts.range(INT8_AFFINE)


def test_order_of_large_batches_does_not_matter() -> None:
    torch.manual_seed(1)
    values = [
        torch.randn(200_000),
        torch.randn(1000) * 50,
        torch.randn(400_001) - 3,
        torch.full((10,), 1e-30),
    ]
    forth, back = after(HistogramEstimator(), *values), after(HistogramEstimator(), *reversed(values))
    assert same_state(forth, back)


def test_a_tiny_first_batch_does_no_harm() -> None:
    torch.manual_seed(2)
    tiny, large = 1e-30 * torch.randn(1000), 1e3 * torch.randn(100_000)
    with_tiny, without = after(HistogramEstimator(), tiny, large), after(HistogramEstimator(), large)
    found, expected = with_tiny.range(INT8_AFFINE), without.range(INT8_AFFINE)
    assert found is not None
    assert expected is not None
    assert found.min == pytest.approx(expected.min, rel=1e-3)
    assert found.max == pytest.approx(expected.max, rel=1e-3)


@given(batches, batches)
def test_merging_is_seeing_both(one: list[NDArray[np.float32]], other: list[NDArray[np.float32]]) -> None:
    for kind in (MinMaxEstimator, HistogramEstimator):
        merged = kind()
        after(merged, *map(torch.from_numpy, one))
        second = kind()
        after(second, *map(torch.from_numpy, other))
        merged.merge(second)
        assert same_state(merged, after(kind(), *map(torch.from_numpy, one + other)))


# -------------------------------------------------------------------------------------- moving average


@given(batches, st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_the_moving_average_covers_all_batches_at_first_and_then_follows_as_torchaos_does(
    values: list[NDArray[np.float32]], constant: float
) -> None:
    small = [np.clip(v, -1e30, 1e30) for v in values]
    start = small[: int(1 / constant)]
    ours = after(MovingAverageEstimator(constant), *map(torch.from_numpy, start))
    assert same_range(ours, after(MinMaxEstimator(), *map(torch.from_numpy, start)))
    theirs = MovingAverageMinMaxObserver(constant)
    theirs.min_val.copy_(ours.min_val)
    theirs.max_val.copy_(ours.max_val)
    for batch in map(torch.from_numpy, small[len(start) :]):
        ours.update(batch)
        theirs(batch)
    size = max(abs(float(v)) for batch in small for v in batch)
    assert ours.min_val.item() == pytest.approx(theirs.min_val.item(), rel=1e-5, abs=1e-6 * size)
    assert ours.max_val.item() == pytest.approx(theirs.max_val.item(), rel=1e-5, abs=1e-6 * size)


def same_range(one: Estimator, other: Estimator) -> bool:
    return bool(one.min_val == other.min_val) and bool(one.max_val == other.max_val)


def test_the_moving_average_in_numbers() -> None:
    estimator = after(MovingAverageEstimator(0.5), torch.tensor([0.0, 8.0]), torch.tensor([-4.0, 0.0]))
    assert estimator.range(INT8_AFFINE) == Range(-4.0, 8.0)
    estimator.update(torch.tensor([-1.0, 6.0], dtype=torch.float16))
    assert estimator.range(INT8_AFFINE) == Range(-2.5, 7.0)


@pytest.mark.parametrize("constant", [0.0, -0.1, 1.5, math.nan])
def test_a_senseless_averaging_constant_is_refused(constant: float) -> None:
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\]"):
        MovingAverageEstimator(constant)


# --------------------------------------------------------------------------------- values of all kinds


@every_estimator
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [3, 140_000])
def test_nan_and_infinity_are_counted_and_left_out(kind: type[Estimator], dtype: torch.dtype, size: int) -> None:
    values = torch.linspace(-1, 2, size).to(dtype)
    for bad in ([math.nan], [math.inf], [-math.inf], [math.nan, -math.inf, math.inf]):
        estimator = kind()
        estimator.update(torch.cat((values, torch.tensor(bad, dtype=dtype))))
        assert estimator.nonfinite_batches.item() == 1
        assert (estimator.min_val.item(), estimator.max_val.item()) == (-1.0, 2.0)
        estimator.update(values)
        assert estimator.nonfinite_batches.item() == 1
        assert estimator.range(INT8_AFFINE) == Range(-1.0, 2.0)


@every_estimator
@pytest.mark.parametrize("size", [1, 140_000])
def test_a_batch_without_a_finite_value_leaves_the_range_alone(kind: type[Estimator], size: int) -> None:
    estimator = after(kind(), torch.full((size,), math.nan))
    assert estimator.range(INT8_AFFINE) is None
    after(estimator, torch.tensor([1.0, 3.0]), torch.full((size,), math.inf))
    assert estimator.range(INT8_AFFINE) == Range(1.0, 3.0)
    assert estimator.nonfinite_batches.item() == 2


@every_estimator
def test_float64_beyond_float32_counts_as_not_finite(kind: type[Estimator]) -> None:
    estimator = after(kind(), torch.tensor([-1e300, 0.5, 1e39], dtype=torch.float64))
    assert estimator.range(INT8_AFFINE) == Range(0.5, 0.5)
    assert estimator.nonfinite_batches.item() == 1


@every_estimator
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0], Range(0.0, 0.0)),
        ([-0.0], Range(0.0, 0.0)),
        ([-2.5], Range(-2.5, -2.5)),
        ([7.0, 7.0, 7.0], Range(7.0, 7.0)),
        ([-1e-40, 1e-45], Range(float(np.float32(-1e-40)), float(np.float32(1e-45)))),
        ([-3e38, 3e38], Range(float(np.float32(-3e38)), float(np.float32(3e38)))),
    ],
)
def test_plain_cases(kind: type[Estimator], values: list[float], expected: Range) -> None:
    found = after(kind(), torch.tensor(values)).range(INT8_AFFINE)
    assert found == expected
    assert math.copysign(1.0, expected.min) == math.copysign(1.0, found.min), "-0.0"


@every_estimator
def test_nothing_seen_is_no_range(kind: type[Estimator]) -> None:
    assert kind().range(INT8_AFFINE) is None


# ---------------------------------------------------------------------------------- fill, reset, state


@every_estimator
def test_fill_is_as_if_the_range_had_been_seen(kind: type[Estimator]) -> None:
    torch.manual_seed(3)
    estimator = after(kind(), torch.randn(100_000), torch.tensor([math.nan]))
    estimator.fill(Range(-10.0, 12.5))
    assert estimator.range(INT8_AFFINE) == Range(-10.0, 12.5)
    assert estimator.nonfinite_batches.item() == 0
    estimator.reset()
    assert same_state(estimator, kind())


@pytest.mark.parametrize("kind", MERGEABLE)
def test_batches_after_fill_widen_the_range(kind: type[Estimator]) -> None:
    torch.manual_seed(4)
    estimator = kind()
    estimator.fill(Range(-10.0, 1.0))
    values = torch.randn(100_000)
    estimator.update(values)
    assert estimator.range(INT8_AFFINE) == Range(-10.0, values.max().item())


@every_estimator
def test_the_state_survives_copies_and_files(kind: type[Estimator]) -> None:
    torch.manual_seed(5)
    estimator = after(kind(), torch.randn(1000), torch.tensor([math.inf, 2.0]))
    file = io.BytesIO()
    torch.save(estimator, file)
    file.seek(0)
    loaded = kind()
    loaded.load_state_dict(estimator.state_dict())
    for other in (copy.deepcopy(estimator), loaded, torch.load(file, weights_only=False)):
        assert same_state(estimator, other)
        assert other.range(INT8_AFFINE) == estimator.range(INT8_AFFINE)
        other.update(torch.tensor([1e6]))
        assert not same_state(estimator, other)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casting_the_model_does_not_round_the_state(kind: type[Estimator], dtype: torch.dtype) -> None:
    estimator = after(kind(), torch.tensor([-1e30, 0.1]))
    before = copy.deepcopy(estimator)
    torch.nn.Sequential(estimator).to(dtype)
    assert estimator.min_val.dtype == torch.float32
    assert same_state(before, estimator)
    assert torch.nn.Sequential(estimator).to("meta")[0].min_val.device.type == "meta"
