"""Guesses at what a completion goes on with, from what others said after the same tokens.

Of a guess the engine takes over what it would have drawn anyway: it draws every token with that token's own uniform
number and keeps the guesses that come out the same. So drafts save steps, and change no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ORDER = 4
"""Tokens that two completions must have in common before one is a guess for the other."""
MOST_TOKENS = 1 << 22
"""Tokens that are kept of all prompts together; those of the prompts that were asked longest ago go first."""


class DraftIndex:
    """What earlier completions of each prompt said, by the last ``ORDER`` tokens before.

        index.add(prompt, [5, 6, 7, 8, 9, 3])
        index.after(prompt, [4, 6, 7, 8, 9], most=4)

    gives [3]: after the last four tokens the completion that is known went on with 3, and ended.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, dict[tuple[int, ...], tuple[Sequence[int], int]]] = OrderedDict()
        self._tokens = 0

    def add(self, prompt: bytes, tokens: Sequence[int]) -> None:
        """Remember a completion that has ended.

        Args:
            prompt: the tokens of its prompt, as bytes.
            tokens: the last ``ORDER`` tokens of the prompt, if it has so many, and those of the completion.
        """
        known = self._known.setdefault(prompt, {})
        self._known.move_to_end(prompt)
        before = len(known)
        known |= {tuple(tokens[end - ORDER : end]): (tokens, end) for end in range(ORDER, len(tokens))}
        self._tokens += len(known) - before
        while self._tokens > MOST_TOKENS:
            self._tokens -= len(self._known.popitem(last=False)[1])

    def after(self, prompt: bytes, tokens: Sequence[int], most: int) -> Sequence[int]:
        """A guess of at most so many tokens at what follows ``tokens`` in a completion of this prompt."""
        tokens_and_end = self._known.get(prompt, {}).get(tuple(tokens[-ORDER:]))
        if tokens_and_end is None:
            return ()
        said, end = tokens_and_end
        return said[end : end + most]
