"""Reads an exported graph and writes annotations on it."""
