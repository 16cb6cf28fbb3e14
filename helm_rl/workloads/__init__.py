"""Traces: their format, readers, the generator."""
