"""Ranges and qparams: what was observed, and which scale and zero point follow from it. Knows no graphs."""
