"""Trees of completions: where they fork, that a leaf's law is the policy's, and that nothing
depends on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.config import BranchConfig
from megatron_dppo.rl.sampling_mask import find_mask_error
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout import decoding
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.tree import TreePath, count_leaves, count_unique_tokens
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.rollout.local import (
    STOP,
    VOCABULARY,
    assert_logprobs_of_a_plain_forward,
    forks_of,
    generate,
    load_engine,
    make_engine,
    make_policy,
    make_prompts,
    plain_logprobs,
    record_reads,
    sampling_of,
    tokens_of,
    whole_of,
)
from tests.rollout.scripted import completion_of

Branches = Sequence[BranchConfig]
FIXED = (BranchConfig(at=3, children=2), BranchConfig(at=7, children=3))
MIXED = (BranchConfig(entropy=2.9, children=3), BranchConfig(at=5, children=2))
BY_ENTROPY = (BranchConfig(entropy=2.9), BranchConfig(entropy=3.0))
MANY_STOPS = tuple(range(0, 40, 5))


def tree_of(branches: Branches, roots: int = 3, **changes: object) -> Sampling:
    sampling = sampling_of(
        samples=roots * count_leaves(branches, 0), stop=MANY_STOPS, max_tokens=16
    )
    return replace(sampling, branches=tuple(branches), **changes)  # type: ignore[arg-type]


def test_path_forks_after_its_last_fork_and_before_its_end() -> None:
    at = [BranchConfig(at=2), BranchConfig(at=4)]
    path = TreePath(make_prompts(1)[0], (0,), completion_of(range(9)))
    assert path.find_forks(at) == (2, 4)
    assert replace(path, forks=(6,)).find_forks(at) == (6, 7), "a branch has a token"
    path = replace(
        path, completion=completion_of(range(6)), entropies=np.array([5.0, 1.0, 1.0, 2.0, 0.0, 3.0])
    )
    assert path.find_forks([BranchConfig(entropy=1.5)] * 3) == (3, 5, 6), "no fork at the prompt"
    assert path.find_forks([BranchConfig(entropy=1.0)]) == (3,), "more than the limit"


@pytest.mark.parametrize("branches", [FIXED, MIXED])
def test_leaves_share_the_tokens_before_their_fork(branches: Branches, tmp_path: Path) -> None:
    """A path that ended before its fork is each of its leaves."""
    groups = generate(
        make_engine(make_policy(), tmp_path), make_prompts(5, 2, 9, 4), tree_of(branches)
    )
    ended = set()
    for group in groups:
        assert len(group) == 3 * count_leaves(branches, 0)
        for level in range(len(branches)):
            block, below = count_leaves(branches, level), count_leaves(branches, level + 1)
            for slot, leaf in enumerate(group):
                first = group[slot - slot % block]
                position = forks_of(first)[level]
                assert forks_of(leaf)[: level + 1] == forks_of(first)[: level + 1]
                np.testing.assert_array_equal(leaf.token_ids[:position], first.token_ids[:position])
                np.testing.assert_array_equal(leaf.logprobs[:position], first.logprobs[:position])
                if slot % below == 0 and slot % block:
                    assert (leaf is first) == (position == len(first.token_ids))
                    assert leaf is first or len(leaf.token_ids) > position
                    ended.add(leaf is first)
        for leaf in group:
            length = len(leaf.token_ids)
            assert length == len(leaf.logprobs) <= 16 and not set(
                leaf.token_ids[:-1].tolist()
            ) & set(MANY_STOPS)
            assert (leaf.token_ids[-1] in MANY_STOPS) == (leaf.finish_reason == "stop")
    assert ended == {True, False}


@pytest.mark.parametrize("branches", [FIXED, MIXED, BY_ENTROPY])
def test_leaves_have_logprobs_and_entropies_of_a_plain_forward(
    branches: Branches, tmp_path: Path
) -> None:
    """A path forks where its entropy first passes the limit."""
    policy, prompts, temperature = make_policy(), make_prompts(5, 2, 9, 4), 1.1
    groups = generate(
        make_engine(policy, tmp_path), prompts, tree_of(branches, temperature=temperature)
    )
    assert_logprobs_of_a_plain_forward(policy, prompts, groups, temperature)
    positions = set()
    for prompt, group in zip(prompts, groups, strict=True):
        for leaf in group:
            logits = plain_logprobs(policy, prompt, leaf, temperature).double()
            entropies = torch.distributions.Categorical(logits=logits).entropy().numpy()
            assert forks_of(leaf) == TreePath(prompt, (0,), leaf, entropies).find_forks(branches)
            positions.add(forks_of(leaf)[0])
    assert branches == FIXED or len(positions) > 3


@pytest.mark.parametrize("branches", [(), FIXED, BY_ENTROPY])
def test_completions_do_not_depend_on_their_batch(
    branches: Branches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host looks for ended rows at every 16th token only; tokens past the end of a row
    are cut off."""
    policy, prompts, width = (
        make_policy(dtype=torch.float64),
        make_prompts(3, 11, 6),
        count_leaves(branches, 0),
    )
    wide, narrow = (make_engine(policy, tmp_path, max_batch=rows) for rows in (256, 19))
    asked = tree_of(branches, roots=18 // width)
    together = tokens_of(generate(wide, prompts, asked))
    assert together == tokens_of(generate(narrow, prompts, asked))
    assert together == [tokens_of(generate(wide, [prompt], asked))[0] for prompt in prompts]
    assert together != tokens_of(generate(wide, prompts, replace(asked, seed=6)))
    flat = tokens_of(generate(wide, prompts, replace(asked, branches=())))
    assert [group[::width] for group in together] == [group[::width] for group in flat]
    monkeypatch.setitem(decoding.ROUND, "cpu", 5)
    assert together == tokens_of(generate(narrow, prompts, asked))


@pytest.mark.parametrize(("branches", "most"), [(FIXED, 0.8), ((), 1.0)])
def test_no_token_is_read_or_counted_twice(
    branches: Branches, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, shapes = make_engine(make_policy(), tmp_path, max_batch=19), record_reads(monkeypatch)
    groups = generate(
        engine,
        make_prompts(3, 11, 2, 6, 6),
        tree_of(branches, roots=18 // count_leaves(branches, 0)),
    )
    paths = sum(len({id(leaf) for leaf in group}) for group in groups)
    unique = sum(sum(count_unique_tokens(group, branches)) for group in groups)
    assert sum(rows for rows, width in shapes if width == 1) == unique - paths, (
        "a path's first token is the prefill's"
    )
    assert branches or sum(rows for rows, width in shapes if width > 1) == 5
    assert max(rows for rows, _ in shapes) <= 19
    assert unique <= most * sum(len(leaf.token_ids) for group in groups for leaf in group)


def law_of_two_tokens(policy: PreTrainedModel, prompt: Prompt) -> dict[tuple[int, ...], float]:
    """Return the probability of each beginning of two tokens, or of a single stop token."""

    shares: dict[tuple[int, ...], float] = {}
    for first in range(VOCABULARY):
        law, after = (
            plain_logprobs(policy, prompt, completion_of([first, 0]), 1.0).double().exp().tolist()
        )
        if first in STOP:
            shares[first,] = law[first]
        else:
            shares |= {(first, second): law[first] * share for second, share in enumerate(after)}
    return shares


@pytest.mark.parametrize(
    "branches", [(BranchConfig(at=1),), (BranchConfig(entropy=2.9), BranchConfig(at=2))]
)
def test_every_leaf_has_the_law_of_a_single_completion(branches: Branches, tmp_path: Path) -> None:
    """Also the last child, all of whose tokens after the fork were drawn in another round than
    those before."""
    policy, prompt, roots = make_policy(), make_prompts(5)[0], 2048
    width = count_leaves(branches, 0)
    asked = replace(sampling_of(samples=roots * width, max_tokens=3), branches=branches)
    (group,) = generate(make_engine(policy, tmp_path, max_batch=roots * width), [prompt], asked)
    law = law_of_two_tokens(policy, prompt)
    assert abs(sum(law.values()) - 1.0) < 1e-6
    for child in (0, width - 1):
        counts = Counter(tuple(leaf.token_ids[:2].tolist()) for leaf in group[child::width])
        assert set(counts) <= set(law)
        cells = [
            (counts[place], roots * share) for place, share in law.items() if share * roots >= 5
        ]
        cells.append(
            (roots - sum(count for count, _ in cells), roots - sum(mean for _, mean in cells))
        )
        degrees = len(cells) - 1
        assert degrees > 20
        # A normal bound of four standard deviations: p is about 1e-4.
        assert sum((count - mean) ** 2 / mean for count, mean in cells) < degrees + 4 * np.sqrt(
            2 * degrees
        )
    pairs = list(zip(group[::width], group[width - 1 :: width], strict=True))
    forked = [
        (first, last, forks_of(first)[0])
        for first, last in pairs
        if forks_of(first)[0] < len(first.token_ids)
    ]
    apart = [first.token_ids[place] != last.token_ids[place] for first, last, place in forked]
    assert 0.5 < np.mean(apart) < 1.0, "siblings are drawn apart, and agree by chance alone"


@pytest.mark.parametrize(("top_p", "top_k"), [(None, 3), (0.8, 6), (0.8, VOCABULARY + 1)])
@pytest.mark.parametrize("branches", [(), FIXED])
def test_kept_ids_are_those_of_a_plain_forward(
    branches: Branches, top_p: float | None, top_k: int, tmp_path: Path
) -> None:
    """Log-probabilities are of the kept ids: also of tokens that siblings share."""
    policy, prompts = make_policy(), make_prompts(3, 11)
    engine = make_engine(policy, tmp_path, max_batch=19)
    asked = replace(tree_of(branches), top_p=top_p, top_k=top_k)
    groups = generate(engine, prompts, replace(asked, sampling_mask=True))
    assert tokens_of(groups) == tokens_of(generate(engine, prompts, asked))
    widths = set()
    for prompt, group in zip(prompts, groups, strict=True):
        for leaf in group:
            assert find_mask_error(leaf.sampling_mask, leaf.token_ids, leaf.loss_mask) is None
            plain = plain_logprobs(policy, prompt, leaf, asked.temperature)
            kept = np.split(leaf.sampling_mask.token_ids, np.cumsum(leaf.sampling_mask.counts)[:-1])
            for row, ids, token, logprob in zip(
                plain, kept, leaf.token_ids, leaf.logprobs, strict=True
            ):
                likeliest = row.topk(min(top_k, VOCABULARY))
                before = torch.softmax(likeliest.values, dim=0).cumsum(dim=0).roll(1)
                before[0] = 0.0
                count = int((before < (top_p or 1.1)).sum())
                assert ids.tolist() == likeliest.indices[:count].tolist()
                whole = row[ids].logsumexp(dim=0)
                assert logprob == pytest.approx(float(row[token] - whole), abs=1e-5)
                widths.add(count)
    assert len(widths) == 1 if top_p is None else len(widths) > 2


@torch.no_grad()
@pytest.mark.parametrize("branches", [(), FIXED])
def test_experts_are_those_of_a_plain_forward(branches: Branches, tmp_path: Path) -> None:
    """Also of tokens that siblings share, and of completions that leave the batch before others. No
    engine reads the last token."""
    shape = write_qwen3_moe(tmp_path, Sizes()).routing
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine, prompts, asked = (
        load_engine(tmp_path, max_batch=19),
        make_prompts(3, 11),
        tree_of(branches),
    )
    groups = generate(engine, prompts, replace(asked, routing=shape))
    for prompt, group in zip(prompts, groups, strict=True):
        for leaf in group:
            logits = policy(whole_of(prompt, leaf)[:, :-1], output_router_logits=True).router_logits
            experts = torch.stack([layer.topk(shape.per_token).indices for layer in logits], dim=1)
            np.testing.assert_array_equal(np.sort(leaf.routing), np.sort(experts.numpy()))
    assert tokens_of(groups) == tokens_of(generate(engine, prompts, asked))
