"""Tokens per second of the local rollout engine against transformers' ``generate``, on one thread.

    python benchmarks/local_rollout.py [--repeats 5] [--json]

Both sample from the same random policy of about a million parameters (the quickstart's size), which stops at random:
a token in 32 is a stop token, so that lengths are geometric, 32 on average, cut off at 128. Prompts have 8 to 40
tokens, with 8 completions each, all decoded in one batch. Runs alternate, and the median counts. ``generate`` carries
a finished row along until the last one ends, prefills a prompt once per completion, and gives no log-probabilities,
which the engine does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from harness import arguments, finish, in_turn, timed
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling, generate
from megatron_dppo.rollout.local import LocalEngine

VOCABULARY, STOP_TOKENS = 128, (1, 2, 3, 4)
PROMPTS, SAMPLES, MAX_TOKENS = 24, 8, 128
PAD = 0


def make_policy() -> Qwen3ForCausalLM:
    """Random weights are nearly uniform over the vocabulary: the share of stop tokens sets the mean length."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    return Qwen3ForCausalLM(config).eval()


def make_prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 41, size=PROMPTS)
    return [
        Prompt(id=row, token_ids=rng.integers(5, VOCABULARY, size=length).astype(np.int32), text="", label="")
        for row, length in enumerate(lengths)
    ]


def with_engine(policy: Qwen3ForCausalLM, prompts: list[Prompt]) -> Callable[[int], int]:
    """A function from a seed to the number of tokens that the engine generates with it."""
    with tempfile.TemporaryDirectory() as directory:
        policy.config.save_pretrained(directory)
        engine = LocalEngine(directory, device=torch.device("cpu"), dtype=torch.float32, max_batch=PROMPTS * SAMPLES)
    engine.update_weights(lambda to, bucket_mib=64: iter([dict(policy.named_parameters())]), version=0)

    def run(seed: int) -> int:
        sampling = Sampling(
            samples=SAMPLES, max_tokens=MAX_TOKENS, temperature=1.0, stop_token_ids=STOP_TOKENS, seed=seed
        )
        groups = generate(engine, prompts, sampling)
        return sum(len(completion.token_ids) for group in groups for completion in group)

    return run


def with_generate(policy: Qwen3ForCausalLM, prompts: list[Prompt]) -> Callable[[int], int]:
    """The same with ``generate``: one batch, padded on the left."""
    width = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_TOKENS,
        num_return_sequences=SAMPLES,
        eos_token_id=list(STOP_TOKENS),
        pad_token_id=PAD,
    )

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        output = policy.generate(ids, attention_mask=(ids != PAD).long(), generation_config=settings)[:, width:]
        ended = torch.isin(output, torch.tensor(STOP_TOKENS))
        lengths = torch.where(ended.any(dim=1), ended.int().argmax(dim=1) + 1, output.shape[1])
        return int(lengths.sum())

    return run


def main() -> None:
    options = arguments(__doc__, repeats=5).parse_args()
    torch.set_num_threads(1)
    policy, prompts = make_policy(), make_prompts()
    contenders = {"engine": with_engine(policy, prompts), "generate": with_generate(policy, prompts)}

    def rate(run: Callable[[int], int], seed: int) -> float:
        seconds, tokens = timed(lambda: run(seed))
        return tokens / seconds

    rates = in_turn({name: partial(rate, run) for name, run in contenders.items()}, options.repeats)
    speed = {name: median(values) for name, values in rates.items()}
    result: dict[str, Any] = {
        "tokens_per_second_over_generate": speed["engine"] / speed["generate"],
        "engine_tokens_per_second": speed["engine"],
        "generate_tokens_per_second": speed["generate"],
        "completions": PROMPTS * SAMPLES,
        "max_tokens": MAX_TOKENS,
        "threads": 1,
    }
    finish(result, options)


if __name__ == "__main__":
    main()
