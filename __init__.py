"""Quantizers for PT2E export quantization whose annotations keep what the backend's passes assume."""

__version__ = "0.1.0"
