"""Quantizers for PT2E export quantization whose annotations keep what the backend's passes assume."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import configs
    from .annotators.measure import fill_ranges, observe_ranges
    from .annotators.quantizer import AnnotationWarning, BackendQuantizer
    from .checks import Report, check
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
    from .observers.metrics import sqnr_db
    from .observers.observer import UncalibratedWarning, freeze
    from .observers.ranges import Range
    from .observers.table import RangeTable
    from .reports import Explanation, Measurement, Sensitivity, explain
    from .workflow import Quantized, measure_sqnr, quantize, sensitivity

__version__ = "0.1.0"
__all__ = [
    "AnnotationError",
    "AnnotationWarning",
    "BackendQuantizer",
    "ConfigError",
    "Explanation",
    "InputError",
    "Measurement",
    "MissingRangeError",
    "NonFiniteError",
    "Quantized",
    "QuantmarkError",
    "Range",
    "RangeError",
    "RangeTable",
    "Report",
    "Sensitivity",
    "SharingConflictError",
    "UncalibratedError",
    "UncalibratedWarning",
    "UnsafeModelError",
    "UnsupportedOptionError",
    "check",
    "configs",
    "explain",
    "fill_ranges",
    "freeze",
    "measure_sqnr",
    "observe_ranges",
    "quantize",
    "sensitivity",
    "sqnr_db",
]

# Names are imported when they are first asked for: the command line answers at once, and can keep back what torchao
# logs on import.
_HOMES = {
    ".annotators.quantizer": ("AnnotationWarning", "BackendQuantizer"),
    ".annotators.measure": ("fill_ranges", "observe_ranges"),
    ".checks": ("Report", "check"),
    ".observers.metrics": ("sqnr_db",),
    ".observers.observer": ("UncalibratedWarning", "freeze"),
    ".observers.ranges": ("Range",),
    ".observers.table": ("RangeTable",),
    ".reports": ("Explanation", "Measurement", "Sensitivity", "explain"),
    ".workflow": ("Quantized", "measure_sqnr", "quantize", "sensitivity"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "configs":
        return import_module(".configs", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME_OF.get(name, ".observers.errors"), __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
