"""What a quantized graph must satisfy: findings with a code, a node and a cost, on the output of any quantizer."""

from .checker import CODES, KINDS, check, check_calibrated
from .findings import Finding, Report, Severity
from .kinds import Kind

__all__ = ["CODES", "KINDS", "Finding", "Kind", "Report", "Severity", "check", "check_calibrated"]
