"""How long the answers to each prompt were at earlier visits: what the order of asking goes by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dppo.rl.types import Floats, Ints


class ResponseLengths:
    """A decayed mean of the response tokens of each prompt that has been rolled out.

        lengths.update(np.array([7]), np.array([[20, 40]]))
        lengths.expected_tokens(np.array([7, 8]))   # [30, 30]: prompt 8 was never seen, and has the pool's mean

    Args:
        decay: what a visit's mean is worth at the prompt's next visit.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._records: dict[int, tuple[float, float]] = {}
        """Decayed sums over the visits of each prompt: of the mean response, and of 1."""

    def update(self, prompt_ids: Ints, response_lengths: Ints) -> None:
        """Add one visit of each of Q prompts.

        Args:
            prompt_ids: [Q].
            response_lengths: [Q, G], tokens.
        """
        for prompt_id, mean in zip(prompt_ids.tolist(), response_lengths.mean(axis=1).tolist(), strict=True):
            tokens, visits = self._records.get(prompt_id, (0.0, 0.0))
            self._records[prompt_id] = (self.decay * tokens + mean, self.decay * visits + 1.0)

    def expected_tokens(self, prompt_ids: Ints) -> Floats:
        """[N], response tokens to expect of a completion of each prompt; the pool's mean where it was never seen."""
        # fsum is exact, so that the sum does not depend on the order in which prompts were first seen.
        tokens, visits = (math.fsum(record[i] for record in self._records.values()) for i in (0, 1))
        unseen = (tokens, visits) if visits else (0.0, 1.0)
        records = np.array([self._records.get(prompt_id, unseen) for prompt_id in prompt_ids.tolist()]).reshape(-1, 2)
        expected: Floats = records[:, 0] / records[:, 1]
        return expected

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, for JSON."""
        return {str(prompt_id): list(record) for prompt_id, record in self._records.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records = {int(prompt_id): (tokens, visits) for prompt_id, (tokens, visits) in state.items()}
