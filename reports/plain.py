"""Values as JSON can hold them."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Return a value with enums as their own values, and numbers that JSON lacks (inf, nan) as strings."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value
