from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantmark import InputError, sqnr_db


def test_noise_of_a_tenth_is_20_db() -> None:
    reference = torch.tensor([3.0, -4.0])
    assert sqnr_db(reference, reference * 1.1) == pytest.approx(20.0, abs=1e-5)


@given(st.floats(1e-3, 1e3), st.integers(2, 9))
def test_a_scale_common_to_both_changes_nothing(scale: float, bits: int) -> None:
    reference = torch.linspace(-1, 1, 33, dtype=torch.float64)
    test = torch.round(reference * 2**bits) / 2**bits + 2**-bits
    assert sqnr_db(reference * scale, test * scale) == pytest.approx(sqnr_db(reference, test))


def test_the_ends_of_the_scale() -> None:
    ones, zeros = torch.ones(3), torch.zeros(3)
    assert sqnr_db(ones, ones) == math.inf
    assert sqnr_db(zeros, zeros) == math.inf
    assert sqnr_db(zeros, ones) == -math.inf
    assert sqnr_db(ones, zeros) == 0.0
    assert math.isnan(sqnr_db(ones, ones * math.nan))
    assert math.isnan(sqnr_db(ones * math.inf, ones * math.inf))


def test_half_precision_does_not_overflow() -> None:
    reference = torch.full((1000,), 6e4, dtype=torch.float16)
    assert sqnr_db(reference, reference * 0.9) == pytest.approx(20.0, abs=0.1)


def test_a_constant_graph_is_no_obstacle() -> None:
    assert sqnr_db(torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int8)) == math.inf


@pytest.mark.parametrize(
    ("shapes", "message"), [(((2, 3), (3, 2)), r"\(2, 3\) and \(3, 2\)"), (((0,), (0,)), "at least one element")]
)
def test_what_can_not_be_compared(shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sqnr_db(torch.zeros(shapes[0]), torch.zeros(shapes[1]))
