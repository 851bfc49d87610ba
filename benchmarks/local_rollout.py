"""Tokens per second of the local rollout engine against transformers' ``generate``, on one thread.

    python benchmarks/local_rollout.py [--policy runs/quickstart/warm] [--json]

Both sample from the same random policy of about a million parameters (the quickstart's size), which stops at random:
a token in 32 is a stop token, so that lengths are geometric, 32 on average, cut off at 128. Prompts have 8 to 40
tokens, with 8 completions each, all decoded in one batch. Runs alternate, and the median counts. ``generate`` carries
a finished row along until the last one ends, prefills a prompt once per completion, and gives no log-probabilities,
which the engine does.

``products_alone_over_generate`` is what the engine would reach if a step were nothing but the products of its hidden
states with the weights, for the rows that it has at that step: attention, norms and sampling took no time.

With ``--policy``, a policy that was trained on the quickstart's sums, guesses are measured as well: how many times as
many tokens per second a few rows generate with ``rollout.draft_tokens`` = 4 as without, the same tokens in both.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import make_sums
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.decoder import Decoder, RolloutCache
from megatron_dppo.rollout.engine import Sampling, generate
from megatron_dppo.rollout.local import LocalEngine

VOCABULARY, STOP_TOKENS = 128, (1, 2, 3, 4)
PROMPTS, SAMPLES, MAX_TOKENS, REPEATS = 24, 8, 128, 5
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


def with_products_alone(policy: Qwen3ForCausalLM, prompts: list[Prompt]) -> Callable[[int], int]:
    """The engine's products with weights, and nothing else: for the rows of each of its steps with one seed."""
    steps: list[int] = []
    read = Decoder.read

    def noted(decoder: Decoder, cache: RolloutCache, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        steps.append(tokens.numel())
        return read(decoder, cache, tokens, *rest, **more)

    with mock.patch.object(Decoder, "read", noted):
        count = with_engine(policy, prompts)(0)
    weights = [parameter for name, parameter in policy.named_parameters() if name.endswith("proj.weight")]
    weights.append(policy.lm_head.weight)
    inputs = {weight.shape[1]: torch.randn(max(steps), weight.shape[1]) for weight in weights}

    @torch.inference_mode()
    def run(seed: int) -> int:
        for rows in steps:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]][:rows], weight)
        return count

    return run


def drafts(directory: Path) -> dict[str, Any]:
    """What guesses are worth to a trained policy, by how many rows are decoded: four seeds in turn, each with and
    without, so that the completions of one seed are guesses for the next."""
    problems, _ = make_sums(ArithmeticConfig(problems=16, min_terms=2, max_terms=6, max_operand=9))
    tokenizer = load_tokenizer(directory)
    prompts = [
        Prompt(row, np.array(tokenizer.encode(problem.question), np.int32), problem.question, problem.label)
        for row, problem in enumerate(problems)
    ]
    weights = load_file(directory / "model.safetensors")
    found: dict[str, Any] = {}
    for count in DRAFTED_PROMPTS:
        seconds, differences, same = {0: 0.0, DRAFT_TOKENS: 0.0}, [0.0], True
        engines = {}
        for guessed in seconds:
            engines[guessed] = LocalEngine(
                directory, device=torch.device("cpu"), dtype=torch.float32, max_batch=256, draft_tokens=guessed
            )
            engines[guessed].update_weights(lambda to, bucket_mib=64: iter([weights]), version=0)
        for seed in range(4 + REPEATS):
            said = {}
            for guessed, engine in engines.items():
                start = time.perf_counter()
                sampling = Sampling(samples=8, max_tokens=64, temperature=1.0, stop_token_ids=(2,), seed=seed)
                said[guessed] = sum(generate(engine, prompts[:count], sampling), ())
                seconds[guessed] += time.perf_counter() - start if seed >= 4 else 0.0
            for one, two in zip(*said.values(), strict=True):
                same = same and one.token_ids.tolist() == two.token_ids.tolist()
                differences += np.abs(one.logprobs - two.logprobs).tolist() if same else []
        found[f"{8 * count}_rows"] = {
            "drafts_over_without": seconds[0] / seconds[DRAFT_TOKENS],
            "same_tokens": same,
            "largest_logprob_difference": max(differences),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="a policy that knows sums, for drafts")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    quiet = options.json
    torch.set_num_threads(1)
    policy, prompts = make_policy(), make_prompts()
    contenders = {
        "engine": with_engine(policy, prompts),
        "generate": with_generate(policy, prompts),
        "products": with_products_alone(policy, prompts),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(-1, REPEATS):  # the first round warms up
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run(repeat + 1)
            seconds = time.perf_counter() - start
            if repeat >= 0:
                rates[name].append(tokens / seconds)
            if not quiet:
                note = " (warm-up)" if repeat < 0 else ""
                print(f"{name:>8}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s{note}")
    speed = {name: median(values) for name, values in rates.items()}
    result: dict[str, Any] = {
        "tokens_per_second_over_generate": speed["engine"] / speed["generate"],
        "products_alone_over_generate": speed["products"] / speed["generate"],
        "engine_tokens_per_second": speed["engine"],
        "generate_tokens_per_second": speed["generate"],
        "completions": PROMPTS * SAMPLES,
        "max_tokens": MAX_TOKENS,
        "threads": 1,
    }
    if options.policy:
        result["drafts"] = drafts(options.policy)
    if not quiet:
        print(f"The engine is {result['tokens_per_second_over_generate']:.1f} times as fast as generate.")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
