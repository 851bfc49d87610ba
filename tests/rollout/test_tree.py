"""Trees of completions: where they fork, that a leaf's law is the policy's, and that nothing depends on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.config import BranchConfig
from megatron_dppo.config import replace as replace_branch
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout import decoding
from megatron_dppo.rollout.engine import Sampling, generate
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.tree import fork_positions, leaves_below, unique_tokens
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.rollout.leaves import forks_of
from tests.rollout.test_local import (
    STOP,
    make_engine,
    make_policy,
    make_prompts,
    one_thread,  # noqa: F401
    plain_logprobs,
    sampling_of,
    shapes_read,
    source_of,
    tokens_of,
)

FIXED = (BranchConfig(at=3, children=2), BranchConfig(at=7, children=3))
MIXED = (BranchConfig(entropy=2.9, children=3), BranchConfig(at=5, children=2))
BY_ENTROPY = (BranchConfig(entropy=2.9), BranchConfig(entropy=3.0))
TREES = {"fixed": FIXED, "mixed": MIXED, "by entropy": BY_ENTROPY}
MANY_STOPS = tuple(range(0, 40, 5))


def tree_of(branches: tuple[BranchConfig, ...], roots: int = 3, **changes: object) -> Sampling:
    sampling = sampling_of(samples=roots * leaves_below(branches, 0), stop=MANY_STOPS, max_tokens=16)
    return replace(sampling, branches=branches, **changes)  # type: ignore[arg-type]


@torch.no_grad()
def entropies_along(policy: PreTrainedModel, prompt: Prompt, completion: Completion, temperature: float) -> np.ndarray:
    """[L], of the distribution that each token was drawn from, by a forward of its own."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64))
    logits = policy(input_ids=ids[None]).logits[0, len(prompt.token_ids) - 1 : -1].double()
    return torch.distributions.Categorical(logits=logits / temperature).entropy().numpy()


def test_a_path_forks_after_its_last_fork_and_never_where_it_has_ended() -> None:
    at = [BranchConfig(at=2), BranchConfig(at=4)]
    assert fork_positions(at, 9, None) == (2, 4)
    assert fork_positions(at, 4, None) == (2, 4), "4 is the length: it has ended there, and does not fork"
    assert fork_positions(at, 2, None) == (2, 2)
    assert fork_positions(at, 9, None, before=(6,)) == (6, 7), "a branch has a token"
    entropies = np.array([5.0, 1.0, 1.0, 2.0, 0.0, 3.0])
    assert fork_positions([BranchConfig(entropy=1.5)] * 3, 6, entropies) == (3, 5, 6), "no fork at the prompt"
    assert fork_positions([BranchConfig(entropy=1.0)], 6, entropies) == (3,), "more than the limit"
    assert fork_positions([BranchConfig(entropy=9.0), BranchConfig(at=2)], 6, entropies) == (6, 6)


@pytest.mark.parametrize("name", TREES)
def test_leaves_share_what_came_before_their_fork_and_a_path_that_ended_stands_for_all(
    name: str, tmp_path: Path
) -> None:
    branches = TREES[name]
    groups = generate(make_engine(make_policy(), tmp_path), make_prompts(5, 2, 9, 4), tree_of(branches))
    seen: Counter[str] = Counter()
    for group in groups:
        assert len(group) == 3 * leaves_below(branches, 0)
        for level in range(len(branches)):
            block, below = leaves_below(branches, level), leaves_below(branches, level + 1)
            for start in range(0, len(group), block):
                first, position = group[start], forks_of(group[start])[level]
                for slot in range(start, start + block):
                    leaf = group[slot]
                    assert forks_of(leaf)[: level + 1] == forks_of(first)[: level + 1]
                    np.testing.assert_array_equal(leaf.token_ids[:position], first.token_ids[:position])
                    np.testing.assert_array_equal(leaf.logprobs[:position], first.logprobs[:position])
                    if position == len(first.token_ids):
                        assert leaf is first, "it ended before it could fork"
                        seen["ended"] += 1
                    elif slot % below == 0 and slot > start:
                        assert leaf is not first and len(leaf.token_ids) > position
                        seen["another way"] += bool(leaf.token_ids[position] != first.token_ids[position])
                        seen["forked"] += 1
        for leaf in group:
            length = len(leaf.token_ids)
            assert leaf.versions == (VersionSpan(1, length),) and leaf.loss_mask.all()
            assert length == len(leaf.logprobs) <= 16 and not set(leaf.token_ids[:-1].tolist()) & set(MANY_STOPS)
            assert (leaf.token_ids[-1] in MANY_STOPS) == (leaf.finish_reason == "stop")
            assert length == 16 or leaf.finish_reason == "stop"
    assert seen["ended"] > 5 and seen["forked"] > 5 and seen["another way"] > 0.6 * seen["forked"]


@pytest.mark.parametrize("name", ["mixed", "by entropy"])
def test_a_path_forks_where_its_entropy_first_passes_the_limit(name: str, tmp_path: Path) -> None:
    policy, branches, prompts = make_policy(), TREES[name], make_prompts(5, 2, 9, 4)
    positions = set()
    for prompt, group in zip(prompts, generate(make_engine(policy, tmp_path), prompts, tree_of(branches)), strict=True):
        for leaf in group:
            expected = fork_positions(branches, len(leaf.token_ids), entropies_along(policy, prompt, leaf, 1.0))
            assert forks_of(leaf) == expected
            positions.add(expected[0])
    assert len(positions) > 3


@pytest.mark.parametrize("name", TREES)
def test_logprobs_of_every_leaf_are_those_of_a_plain_forward(name: str, tmp_path: Path) -> None:
    policy, prompts = make_policy(), make_prompts(5, 2, 9)
    groups = generate(make_engine(policy, tmp_path), prompts, tree_of(TREES[name], temperature=1.7))
    for prompt, group in zip(prompts, groups, strict=True):
        for leaf in group:
            expected = plain_logprobs(policy, prompt, leaf, 1.7)
            np.testing.assert_allclose(leaf.logprobs, expected, atol=1e-5, rtol=0)


def test_children_that_are_not_generated_are_copies_of_their_sibling_and_the_others_are_as_ever(
    tmp_path: Path,
) -> None:
    pruned = tuple(replace_branch(branch, keep=0.4) for branch in FIXED)
    engine, prompts = make_engine(make_policy(), tmp_path, max_batch=72), make_prompts(5, 2, 9, 4)
    every, some = (generate(engine, prompts, tree_of(branches, roots=12)) for branches in (FIXED, pruned))
    drawn: Counter[float] = Counter()
    for whole, group in zip(every, some, strict=True):
        for slot, leaf in enumerate(group):
            if 0.0 not in leaf.weights:
                np.testing.assert_array_equal(leaf.token_ids, whole[slot].token_ids)
                assert forks_of(leaf) == forks_of(whole[slot])
            else:
                level = leaf.weights.index(0.0) - 1
                below = leaves_below(pruned, level + 1)
                sibling = group[slot - slot % leaves_below(pruned, level) + slot % below]
                assert leaf.token_ids is sibling.token_ids and leaf.segments is sibling.segments
                assert leaf.weights == (*sibling.weights[: level + 1], 0.0, *sibling.weights[level + 2 :])
            for level, weight in enumerate(leaf.weights[1:]):
                first = slot % leaves_below(pruned, level) == 0
                if 0.0 in leaf.weights[: level + 1] or slot % leaves_below(pruned, level + 1):
                    continue  # a copy, or not the first leaf of a child
                forked = forks_of(leaf)[level] < len(leaf.token_ids)
                assert weight in ((0.0, 2.5) if forked and not first else (1.0,))
                drawn[weight] += 1
        assert unique_tokens(group, pruned) < unique_tokens(whole, FIXED)
    assert drawn[2.5] / (drawn[0.0] + drawn[2.5]) == pytest.approx(0.4, abs=0.12)
    assert drawn[0.0] + drawn[2.5] > 40


@pytest.mark.parametrize("name", TREES)
def test_a_tree_does_not_depend_on_its_company_or_on_the_batch(name: str, tmp_path: Path) -> None:
    policy, asked = make_policy(dtype=torch.float64), tree_of(TREES[name])
    prompts = make_prompts(3, 11, 6)
    wide, narrow = (make_engine(policy, tmp_path, dtype=torch.float64, max_batch=rows) for rows in (256, 19))
    together = tokens_of(generate(wide, prompts, asked))
    assert together == tokens_of(generate(narrow, prompts, asked))
    assert together == [tokens_of(generate(wide, [prompt], asked))[0] for prompt in prompts]
    flat = tokens_of(generate(wide, prompts, replace(asked, branches=())))
    width = leaves_below(asked.branches, 0)
    roots = [[group[slot] for slot in range(0, len(group), width)] for group in together]
    assert roots == [[group[slot] for slot in range(0, len(group), width)] for group in flat]


def test_what_leaves_share_is_decoded_once_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LEAST_COMMON", 1000)  # or what is left of a prompt could be a single token
    engine, shapes = make_engine(make_policy(), tmp_path, max_batch=19), shapes_read(monkeypatch)
    groups = generate(engine, make_prompts(3, 11, 2, 6, 6), tree_of(FIXED))
    paths = sum(len({id(leaf) for leaf in group}) for group in groups)
    unique = sum(unique_tokens(group, FIXED) for group in groups)
    assert sum(rows for rows, width in shapes if width == 1) == unique - paths, "a path's first token is the prefill's"
    assert max(rows for rows, _ in shapes) <= 19
    assert unique < 0.8 * sum(len(leaf.token_ids) for group in groups for leaf in group)
    flat = sum(generate(engine, make_prompts(3, 11), sampling_of()), ())
    assert unique_tokens(flat, ()) == sum(len(leaf.token_ids) for leaf in flat)


@torch.no_grad()
def law_of_two_tokens(policy: PreTrainedModel, prompt: Prompt) -> dict[tuple[int, ...], float]:
    """How likely each beginning of two tokens is, or of one that ends a response."""

    def law(after: Sequence[int]) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, after]).astype(np.int64))
        return torch.softmax(policy(input_ids=ids[None]).logits[0, -1].double(), dim=-1).numpy()

    shares: dict[tuple[int, ...], float] = {}
    for first, share in enumerate(law([])):
        if first in STOP:
            shares[first,] = share
        else:
            shares |= {(first, second): share * other for second, other in enumerate(law([first]))}
    return shares


@pytest.mark.parametrize(
    "branches", [(BranchConfig(at=1),), (BranchConfig(entropy=2.9), BranchConfig(at=2))], ids=["fixed", "by entropy"]
)
def test_every_leaf_has_the_law_of_a_completion_that_was_sampled_by_itself(
    branches: tuple[BranchConfig, ...], tmp_path: Path
) -> None:
    """Also the last child, all of whose tokens after the fork were drawn in another round than those before."""
    policy, prompt, roots = make_policy(), make_prompts(5)[0], 2048
    width = leaves_below(branches, 0)
    asked = replace(sampling_of(samples=roots * width, max_tokens=3), branches=branches)
    (group,) = generate(make_engine(policy, tmp_path, max_batch=roots * width), [prompt], asked)
    law = law_of_two_tokens(policy, prompt)
    assert abs(sum(law.values()) - 1.0) < 1e-9
    for child in (0, width - 1):
        leaves = group[child::width]
        counts = Counter(tuple(leaf.token_ids[:2].tolist()) for leaf in leaves)
        assert set(counts) <= set(law)
        frequent = [place for place, share in law.items() if share * roots >= 5]
        cells = [(counts[place], roots * law[place]) for place in frequent]
        cells.append((roots - sum(count for count, _ in cells), roots - sum(mean for _, mean in cells)))
        degrees = len(cells) - 1
        assert degrees > 20
        # A normal bound of four standard deviations: p is about 1e-4.
        assert sum((count - mean) ** 2 / mean for count, mean in cells) < degrees + 4 * np.sqrt(2 * degrees)
    pairs = [(first, last) for first, last in zip(group[::width], group[width - 1 :: width], strict=True)]
    forked = [(first, last, forks_of(first)[0]) for first, last in pairs if forks_of(first)[0] < len(first.token_ids)]
    apart = [first.token_ids[place] != last.token_ids[place] for first, last, place in forked]
    assert 0.5 < np.mean(apart) < 1.0, "siblings are drawn apart, and agree by chance alone"


def test_siblings_have_the_same_experts_for_what_they_share(tmp_path: Path) -> None:
    shape = write_qwen3_moe(tmp_path, Sizes()).routing
    engine = LocalEngine(tmp_path, device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
    engine.update_weights(source_of(load_file(tmp_path / "model.safetensors")), version=1)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = make_prompts(3, 11)
    for prompt, group in zip(prompts, generate(engine, prompts, tree_of(FIXED, routing=shape)), strict=True):
        for leaf in group:
            tokens = np.concatenate([prompt.token_ids, leaf.token_ids])[:-1].astype(np.int64)
            with torch.no_grad():
                logits = policy(torch.from_numpy(tokens)[None], output_router_logits=True).router_logits
            experts = torch.stack([layer.topk(shape.per_token).indices for layer in logits], dim=1)
            np.testing.assert_array_equal(np.sort(leaf.routing), np.sort(experts.numpy()))
