"""Measures how good a policy is: benchmarks by name, several answers to each problem, scores with
intervals."""
