"""Pruning of completions in trainers of others."""
