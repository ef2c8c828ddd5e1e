"""One config per backend: `configs.xnnpack()`, ... Each returns a frozen `BackendConfig`."""

from .arm import arm_tosa
from .base import (
    ActivationConfig,
    BackendConfig,
    BiasConfig,
    BiasKind,
    BlockRules,
    FixedQParams,
    OpRules,
    Spectra,
    SymmetricActivation,
    WeightConfig,
)
from .cadence import cadence
from .limits import Limits
from .xnnpack import xnnpack

__all__ = [
    "ActivationConfig",
    "BackendConfig",
    "BiasConfig",
    "BiasKind",
    "BlockRules",
    "FixedQParams",
    "Limits",
    "OpRules",
    "Spectra",
    "SymmetricActivation",
    "WeightConfig",
    "arm_tosa",
    "cadence",
    "xnnpack",
]
