"""Tokens per second of the local rollout engine against transformers' ``generate``, on one thread.

    python benchmarks/local_rollout.py [--policy runs/quickstart/warm] [--repeats 5] [--json]

Both sample from the same random policy of about a million parameters (the quickstart's size), which stops at random:
a token in 32 is a stop token, so that lengths are geometric, 32 on average, cut off at 128. Prompts have 8 to 40
tokens, with 8 completions each, all decoded in one batch. Runs alternate, and the median counts. ``generate`` carries
a finished row along until the last one ends, prefills a prompt once per completion, and gives no log-probabilities,
which the engine does.

With ``--policy``, a policy that was trained on the quickstart's sums, guesses are measured as well: how many times as
many tokens per second a few rows generate with ``rollout.draft_tokens`` = 4 as without, the same tokens in both.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from harness import arguments, finish, in_turn, timed
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import make_sums
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.engine import Sampling, generate
from megatron_dppo.rollout.local import LocalEngine

VOCABULARY, STOP_TOKENS = 128, (1, 2, 3, 4)
PROMPTS, SAMPLES, MAX_TOKENS = 24, 8, 128
PAD = 0
DRAFT_TOKENS, DRAFTED_PROMPTS = 4, (1, 2, 16)


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


def drafts(directory: Path, repeats: int) -> dict[str, Any]:
    """What guesses are worth to a trained policy, by how many rows are decoded: four seeds in turn, each with and
    without, so that the completions of one seed are guesses for the next."""
    problems, _ = make_sums(ArithmeticConfig(problems=16, min_terms=2, max_terms=6, max_operand=9))
    tokenizer = load_tokenizer(directory)
    prompts = [
        Prompt(row, np.array(tokenizer.encode(problem.question), np.int32), problem.question, problem.label)
        for row, problem in enumerate(problems)
    ]
    weights = load_file(directory / "model.safetensors")

    def said(engine: LocalEngine, count: int, seed: int) -> tuple[float, tuple[Completion, ...]]:
        sampling = Sampling(samples=8, max_tokens=64, temperature=1.0, stop_token_ids=(2,), seed=seed)
        return timed(lambda: sum(generate(engine, prompts[:count], sampling), ()))

    found: dict[str, Any] = {}
    for count in DRAFTED_PROMPTS:
        contenders = {}
        for guessed in (0, DRAFT_TOKENS):
            engine = LocalEngine(
                directory, device=torch.device("cpu"), dtype=torch.float32, max_batch=256, draft_tokens=guessed
            )
            engine.update_weights(lambda to, bucket_mib=64: iter([weights]), version=0)
            contenders[str(guessed)] = partial(said, engine, count)
        without, drafted = in_turn(contenders, repeats, warm_up=4).values()
        pairs = [
            each for turns in zip(without, drafted, strict=True) for each in zip(turns[0][1], turns[1][1], strict=True)
        ]
        same = [pair for pair in pairs if pair[0].token_ids.tolist() == pair[1].token_ids.tolist()]
        found[f"{8 * count}_rows"] = {
            "drafts_over_without": sum(seconds for seconds, _ in without) / sum(seconds for seconds, _ in drafted),
            "same_tokens": len(same) == len(pairs),
            "largest_logprob_difference": max(float(np.abs(one.logprobs - two.logprobs).max()) for one, two in same),
        }
    return found


def main() -> None:
    options = arguments(__doc__, policy=(Path, "a policy that knows sums, for drafts"), repeats=5).parse_args()
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
    if options.policy:
        result["drafts"] = drafts(options.policy, options.repeats)
    finish(result, options)


if __name__ == "__main__":
    main()
