"""What was decided and found, for people: terminal tables, JSON, and one HTML page without network."""

from .explain import explain
from .explanation import Explanation
from .measured import Measurement
from .node_data import node_data
from .sensitive import Sensitivity

__all__ = ["Explanation", "Measurement", "Sensitivity", "explain", "node_data"]
