"""A small Qwen3 whose weights are large enough to prefer some tokens, its local engine, and a plain
forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.decoder import Decoder
from megatron_dppo.rollout.engine import Bucket, Completions, RolloutEngine, Sampling, WeightSource
from megatron_dppo.rollout.local import LocalEngine
from tests import policies
from tests.bridge.conversions import policy_tensors

VOCABULARY = 40
STOP = (3, 7)
Groups = Sequence[Sequence[Completion]]


def generate(
    engine: RolloutEngine[Any], prompts: Sequence[Prompt], sampling: Sampling
) -> Completions:
    """Request completions and wait for them. Collective."""
    return engine.finish(engine.begin(prompts, sampling))


def make_policy(
    seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float32
) -> Qwen3ForCausalLM:
    made = policies.make_policy(
        vocab=VOCABULARY, layers=2, hidden=32, ffn=64, std=0.3, tied=tied, seed=seed
    )
    made.config.architectures = ["Qwen3ForCausalLM"]
    return made.to(dtype=dtype).eval()


def source_of(tensors: Mapping[str, torch.Tensor], size: int = 5) -> WeightSource:
    def source(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        assert to is Consumers.EVERYONE, "every rank has an engine"
        items = list(tensors.items())
        for start in range(0, len(items), size):
            yield dict(items[start : start + size])

    return source


def weights_of(policy: PreTrainedModel) -> WeightSource:
    return source_of(dict(policy.named_parameters()))


def make_engine(policy: PreTrainedModel, path: Path, **options: Any) -> LocalEngine:
    policy.config.save_pretrained(path)
    return load_engine(path, weights_of(policy), dtype=policy.dtype, **options)


def load_engine(path: Path, source: WeightSource | None = None, **options: Any) -> LocalEngine:
    """Return an engine with the weights of a source, or of a stored policy."""
    defaults = {"device": torch.device("cpu"), "dtype": torch.float32, "max_batch": 64}
    engine = LocalEngine(path, **(defaults | options))
    engine.update_weights(source or source_of(policy_tensors(path)), version=1)
    return engine


def make_prompts(*lengths: int, first_id: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(1)
    tokens = [rng.integers(8, VOCABULARY, length).astype(np.int32) for length in lengths]
    return [
        Prompt(first_id + row, token_ids, text="", label="") for row, token_ids in enumerate(tokens)
    ]


def sampling_of(
    samples: int = 4,
    max_tokens: int = 24,
    temperature: float = 1.0,
    stop: tuple[int, ...] = STOP,
    seed: int = 5,
) -> Sampling:
    return Sampling(
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=stop,
        seed=seed,
    )


def tokens_of(groups: Groups) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def bits_of(groups: Groups) -> list[list[tuple[list[int], bytes, list[bool]]]]:
    return [
        [(c.token_ids.tolist(), c.logprobs.tobytes(), c.loss_mask.tolist()) for c in group]
        for group in groups
    ]


def forks_of(leaf: Completion, levels: int = 2) -> tuple[int, ...]:
    """Return the numbers of tokens after which the path to a leaf forked; its length if it ended
    before a fork."""
    return tuple(
        int(np.count_nonzero(np.asarray(leaf.segments) <= level)) for level in range(levels)
    )


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that gets the rows and tokens of every call of the decoder."""
    shapes: list[tuple[int, ...]] = []
    read = Decoder.read

    def noted(
        decoder: Decoder, cache: Any, tokens: torch.Tensor, *rest: Any, **more: Any
    ) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return read(decoder, cache, tokens, *rest, **more)

    monkeypatch.setattr(Decoder, "read", noted)
    return shapes


def whole_of(prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Return [1, P + L]."""
    return torch.from_numpy(
        np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64)
    )[None]


@torch.no_grad()
def plain_logprobs(
    policy: PreTrainedModel, prompt: Prompt, completion: Completion, temperature: float
) -> torch.Tensor:
    """Return [L, vocabulary] of a forward over prompt and completion, alone, unpadded and without a
    cache."""
    logits = (
        policy(input_ids=whole_of(prompt, completion))
        .logits[0, len(prompt.token_ids) - 1 : -1]
        .float()
    )
    return torch.log_softmax(logits / temperature, dim=-1)


def assert_logprobs_of_a_plain_forward(
    policy: PreTrainedModel, prompts: Sequence[Prompt], groups: Groups, temperature: float
) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            plain = plain_logprobs(policy, prompt, completion, temperature).numpy()
            sampled = np.flatnonzero(completion.loss_mask)
            expected = plain[sampled, completion.token_ids[sampled]]
            np.testing.assert_allclose(completion.logprobs[sampled], expected, atol=1e-5, rtol=0)
