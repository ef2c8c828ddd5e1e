"""One config per backend: `configs.xnnpack()`, ... Each returns a frozen `BackendConfig`."""

from ..observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC, Scheme
from ..observers.rules import BranchRules, Conflict, HoistRule, JoinOutcome, JoinRules, Outcome
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
from .ethos import ethos_u55, ethos_u65, ethos_u85
from .limits import Limits
from .xnnpack import xnnpack

__all__ = [
    "INT8_AFFINE",
    "INT8_SYMMETRIC",
    "INT16_SYMMETRIC",
    "ActivationConfig",
    "BackendConfig",
    "BiasConfig",
    "BiasKind",
    "BlockRules",
    "BranchRules",
    "Conflict",
    "FixedQParams",
    "HoistRule",
    "JoinOutcome",
    "JoinRules",
    "Limits",
    "OpRules",
    "Outcome",
    "Scheme",
    "Spectra",
    "SymmetricActivation",
    "WeightConfig",
    "arm_tosa",
    "cadence",
    "ethos_u55",
    "ethos_u65",
    "ethos_u85",
    "xnnpack",
]
