"""Quantizers for PT2E export quantization whose annotations keep what the backend's passes assume."""

from . import configs
from .annotators.quantizer import AnnotationWarning, BackendQuantizer
from .observers.errors import (
    AnnotationError,
    ConfigError,
    InputError,
    MissingRangeError,
    NonFiniteError,
    QuantmarkError,
    RangeError,
    SharingConflictError,
    UncalibratedError,
    UnsafeModelError,
    UnsupportedOptionError,
)
from .observers.observer import UncalibratedWarning
from .observers.ranges import Range

__version__ = "0.1.0"
__all__ = [
    "AnnotationError",
    "AnnotationWarning",
    "BackendQuantizer",
    "ConfigError",
    "InputError",
    "MissingRangeError",
    "NonFiniteError",
    "QuantmarkError",
    "Range",
    "RangeError",
    "SharingConflictError",
    "UncalibratedError",
    "UncalibratedWarning",
    "UnsafeModelError",
    "UnsupportedOptionError",
    "configs",
]
