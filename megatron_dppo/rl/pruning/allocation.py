"""How many completions each prompt of a step is given, from what is known of it before they are generated.

The gradient of a prompt is a mean over its completions, so that n of them leave the variance σ²/n, σ² being that of one
completion's term. The least Σ σ_q²/n_q that a number of tokens Σ n_q·E[L_q] buys has n_q ∝ σ_q/√E[L_q] (Neyman, 1934).
Predicted success has been used to allocate rollouts by Nguyen et al. (VIP, arXiv:2602.01601).
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_dppo.rl.types import Floats, Ints


def allocate(variance: Floats, tokens: Floats, *, mean: int, least: int, most: int) -> Ints:
    """Whole numbers of completions of the least Σ σ²/n within a budget of tokens.

    From ``least`` each, one more goes to the prompt whose variance falls most per token, σ²/(n(n + 1))/E[L], until the
    next one would go beyond the budget. At equal lengths no other numbers leave less variance: these are the priorities
    by which seats of the U.S. House are apportioned (Wright, 2012). Prompts of no variance share evenly what others
    cannot use.

    Args:
        variance: [Q], σ² of each prompt up to a common factor, times 1/π² of its own draw; not negative.
        tokens: [Q], E[L] up to a common factor; positive.
        mean: completions of each prompt that the budget would buy if all were given as many.
        least: fewest of a prompt, at most ``mean``.
        most: most of a prompt, at least ``mean``.

    Returns:
        [Q], from ``least`` to ``most``; Σ n·E[L] is ``mean``·Σ E[L] to within one completion.
    """
    samples = np.full(len(variance), least, np.int64)
    left = (mean - least) * float(tokens.sum()) * (1.0 + 1e-9)  # rounding must not cost a completion
    gain, price = (variance / tokens).tolist(), tokens.tolist()
    queue = [(-each / (least * (least + 1)), least, q) for q, each in enumerate(gain)]
    heapq.heapify(queue)
    while queue:
        _, n, q = heapq.heappop(queue)
        if n == most:
            continue
        if price[q] > left:
            break
        left -= price[q]
        samples[q] = n = n + 1
        heapq.heappush(queue, (-gain[q] / (n * (n + 1)), n, q))
    return samples
