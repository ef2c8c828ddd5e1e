"""What was decided and found, for people: terminal tables, JSON, and one HTML page without network."""

from .explain import explain
from .explanation import Explanation
from .measured import Measurement
from .sensitive import Sensitivity

__all__ = ["Explanation", "Measurement", "Sensitivity", "explain"]
