"""Lifetime, signals, files and output streams of processes."""
