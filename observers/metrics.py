"""How far one result is from another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .errors import InputError
from .fields import require

if TYPE_CHECKING:
    from torch import Tensor


def sqnr_db(reference: Tensor, test: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio of `test`, in dB.

        10 * log10( sum(reference ** 2) / sum((reference - test) ** 2) )

    6.02 dB is one bit. inf where the two are equal; -inf where the reference is 0 throughout and `test` is not;
    NaN where one of them holds NaN or infinity. Computed in float64.

    Raises:
        InputError: if the shapes differ or the tensors are empty.
    """
    for given in (reference, test):
        require(isinstance(given, torch.Tensor), "sqnr_db compares two tensors", given)
    if reference.shape != test.shape:
        raise InputError(f"sqnr_db needs equal shapes, got {tuple(reference.shape)} and {tuple(test.shape)}")
    if reference.numel() == 0:
        raise InputError("sqnr_db needs at least one element, got empty tensors")
    wanted, found = reference.detach().to(torch.float64), test.detach().to(reference.device, torch.float64)
    signal, noise = float(wanted.square().sum()), float((wanted - found).square().sum())
    return ratio_db(signal, noise)


def ratio_db(signal: float, noise: float) -> float:
    """Return the ratio of two energies in dB: inf without noise, -inf with noise alone, NaN if one is not finite."""
    if not math.isfinite(signal + noise):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf
