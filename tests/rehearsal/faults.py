"""Faults put in by hand."""

FAULTS: dict = {}
