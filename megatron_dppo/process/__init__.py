"""Processes: how they end, what they are told while they run, and where their words go."""
