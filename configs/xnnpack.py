"""XNNPACK: int8 affine activations, symmetric int8 weights, float bias."""

from __future__ import annotations

from .base import ActivationConfig, BackendConfig, BiasConfig, BiasKind, WeightConfig
from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC
from dataclasses import replace


def xnnpack(*, activation: str = "int8", per_channel: bool = True, is_qat: bool = False) -> BackendConfig:
    """Return the config."""
    return BackendConfig(name="xnnpack", is_qat=is_qat, weight=WeightConfig(per_channel=per_channel))
