"""What was decided and found, for people: terminal tables, JSON, and one HTML page without network."""

from .explain import explain
from .explanation import Explanation

__all__ = ["Explanation", "explain"]
