"""A reward that random policies earn, each its own."""

TOKENS = 16
"""Of a whole answer."""


def share_of_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    return sum(character.isdigit() for character in solution_str) / TOKENS
