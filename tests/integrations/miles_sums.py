"""Losses of miles on pruned and whole batches, by its own conversion, schedule and reducer:
``test_slime.py`` runs this program.

    MILES=checkout python -m tests.integrations.miles_sums RESULTS

Each token has a vector in place of its gradient.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.integrations.slime_on_ranks import (
    ABSENT,
    DEFAULTS,
    HALF,
    PROMPTS,
    SAMPLES,
    TOKEN,
    VOCABULARY,
    fixed_draws,
    import_sources,
)
from tests.rl.integration import outcomes_of_all

RANKS, SIZE = 2, 5
CASES = {
    "grpo": HALF,
    "per token": TOKEN,
    "gspo": {**HALF, "advantage_estimator": "gspo"},
    "auto where training is half": {"pruning_training_fraction": 0.5},
}


def make_samples(sample: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(PROMPTS):
        asked = rng.integers(0, VOCABULARY, 3).tolist()
        for _ in range(SAMPLES):
            length = int(rng.integers(2, 10))
            made = sample(
                group_index=prompt,
                index=len(samples),
                tokens=asked + rng.integers(0, VOCABULARY, length).tolist(),
                response_length=length,
                reward=float(rng.random() < 0.4) if prompt else 1.0,
                loss_mask=[1] * length,
                rollout_log_probs=(-rng.exponential(1.0, length)).tolist(),
                rollout_indexer_topk=np.zeros((len(asked) + length - 1, 1, 1), np.int32),
                status=sample.Status.COMPLETED,
            )
            samples.append(made)
    return samples


def sum_losses(args: Any, samples: list[Any], vectors: dict[int, Any], hook: Any) -> Any:
    """Return Σ loss · vector / divisor of all ranks, [SIZE], and the tokens sent."""
    from miles.backends.training_utils import cp_utils
    from miles.ray.rollout import train_data_conversion as conversion

    data = conversion.convert_samples_to_train_data(args, copy.deepcopy(samples), {}, None, hook)
    assert all(
        len(topk) == len(tokens) - 1
        for topk, tokens in zip(data["rollout_indexer_topk"], data["tokens"], strict=True)
    )
    parallel = {
        "dp_size": RANKS,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    total, counted, sent = np.zeros(SIZE), 0, 0
    shards = conversion.split_train_data_by_dp_scheduled_raw(
        args, data, train_parallel_config=parallel
    )
    for shard in shards:
        for rows in shard["micro_batch_indices"]:
            masks = [torch.tensor(shard["loss_masks"][row]) for row in rows]
            lengths = [shard["response_lengths"][row] for row in rows]
            reduce = cp_utils.get_sum_of_sample_mean(
                [len(shard["tokens"][row]) for row in rows],
                lengths,
                masks,
                args.calculate_per_token_loss,
                denominators=torch.tensor([shard["rollout_mask_sums"][row] for row in rows]),
            )
            counted += sum(max(int(mask.sum()), 1) for mask in masks)
            sent += sum(len(shard["tokens"][row]) for row in rows)
            losses = torch.cat(
                [
                    vectors[shard["sample_indices"][row]][:length] * shard["rewards"][row]
                    for row, length in zip(rows, lengths, strict=True)
                ]
            )
            total += [float(reduce(losses[:, column])) for column in range(SIZE)]
    divisor = counted if args.calculate_per_token_loss else shards[0]["num_rollouts"][0]
    return total / divisor, sent


def main() -> None:
    warnings.filterwarnings("ignore")
    import_sources("MILES", (*ABSENT, "mooncake", "miles.utils.tracking_utils"))
    from miles.backends.training_utils import cp_utils
    from miles.utils.types import Sample

    from megatron_dppo.integrations.slime import prune_rewards

    group = SimpleNamespace(size=1, rank=0)
    cp_utils.get_parallel_state = lambda: SimpleNamespace(cp=group)
    samples = make_samples(Sample)
    generator = torch.Generator().manual_seed(0)
    vectors = {
        sample.index: torch.randn(sample.response_length, SIZE, generator=generator)
        for sample in samples
    }
    measured = {}
    for name, settings in CASES.items():
        only_miles = {"use_dynamic_global_batch_size": False, "multi_lora": False}
        args = SimpleNamespace(**(DEFAULTS | only_miles | settings))
        whole, all_sent = sum_losses(args, samples, vectors, None)
        probabilities: list[Any] = []
        with fixed_draws(0.5, probabilities):
            sum_losses(args, samples, vectors, prune_rewards)
        mean, tokens = np.zeros(SIZE), 0.0
        for offset, length in outcomes_of_all(probabilities):
            with fixed_draws(offset, []):
                pruned, sent = sum_losses(args, samples, vectors, prune_rewards)
            mean += length * pruned
            tokens += length * sent
        error = np.linalg.norm(mean - whole) / np.linalg.norm(whole)
        measured[name] = {"error": float(error), "tokens": tokens / all_sent}
    Path(sys.argv[1]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
