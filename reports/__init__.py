"""Findings, groups and ranges, shown to people."""
