"""Rules for completions, one to a module."""
