"""Evaluation of policies: named benchmarks, several answers per problem, scores with intervals."""
