"""The local engine: log-probabilities of a plain forward, whatever the batch, and every end at its
place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rollout import decoding
from megatron_dppo.rollout.engine import Bucket
from megatron_dppo.rollout.local import LocalEngine
from tests.policies import write_family
from tests.rollout.local import (
    assert_logprobs_of_a_plain_forward,
    bits_of,
    generate,
    load_engine,
    make_engine,
    make_policy,
    make_prompts,
    sampling_of,
    tokens_of,
    weights_of,
)
from tests.rollout.scripted import as_ranks


def test_stop_token_at_the_limit_ends_and_past_the_limit_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows run up to ``ROUND`` tokens past their limit. A stop token there is no end of the
    completion."""
    monkeypatch.setitem(decoding.ROUND, "cpu", 16)
    engine, prompts = make_engine(make_policy(), tmp_path), make_prompts(3, 11, 2, 6)
    greedy = sampling_of(samples=1, temperature=0.0, stop=())
    ends = 0
    for prompt, (free,) in zip(prompts, generate(engine, prompts, greedy), strict=True):
        tokens = free.token_ids.tolist()
        assert (len(tokens), free.finish_reason) == (24, "length")
        for place in range(2, 12):
            if tokens[place] in tokens[:place]:
                continue
            ends += 1
            stopping = replace(greedy, stop_token_ids=(tokens[place],))
            for limit, reason in ((place + 1, "stop"), (place, "length")):
                ((found,),) = generate(engine, [prompt], replace(stopping, max_tokens=limit))
                assert (found.token_ids.tolist(), found.finish_reason) == (tokens[:limit], reason)
    assert ends > 5


@pytest.mark.parametrize("least", [{"top_k": 1}, {"top_p": 1e-6}])
def test_likeliest_token_alone_is_greedy_at_any_temperature(
    tmp_path: Path, least: dict[str, float]
) -> None:
    policy, prompts = make_policy(tied=False), make_prompts(5, 8, 2)
    engine, hot = make_engine(policy, tmp_path), sampling_of(temperature=1.7)
    greedy = generate(engine, prompts, sampling_of(temperature=0.0))
    groups = generate(engine, prompts, replace(hot, **least))
    free = generate(engine, prompts, hot)
    assert tokens_of(groups) == tokens_of(greedy) != tokens_of(free)
    assert_logprobs_of_a_plain_forward(policy, prompts, free, 1.7)
    assert not any(completion.logprobs.any() for completion in sum(groups, ()))


def test_update_changes_tokens_and_version_of_later_requests(tmp_path: Path) -> None:
    engine, prompts, other = (
        make_engine(make_policy(0), tmp_path),
        make_prompts(5, 8),
        make_policy(9),
    )
    before = generate(engine, prompts, sampling_of())
    pending = engine.begin(prompts, sampling_of())
    engine.pause()
    engine.update_weights(weights_of(other), version=2)
    assert bits_of(engine.finish(pending)) == bits_of(before)
    engine.resume()
    after = generate(engine, prompts, sampling_of())
    assert tokens_of(before) != tokens_of(after)
    for groups, version in ((before, 1), (engine.finish(pending), 1), (after, 2)):
        for completion in sum(groups, ()):
            assert completion.versions.tolist() == [version] * len(completion.token_ids)
    assert_logprobs_of_a_plain_forward(other, prompts, after, 1.0)


def test_unfit_stream_is_consumed_then_refused(tmp_path: Path) -> None:
    policy = make_policy()
    engine = make_engine(policy, tmp_path)
    tensors = dict(policy.named_parameters())
    missing, misshapen, repeated = (
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.embed_tokens.weight",
    )
    consumed = []

    def stream(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        yield {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        yield {name: tensor for name, tensor in tensors.items() if name not in (missing, misshapen)}
        yield {misshapen: torch.zeros(32, 64)}
        yield {repeated: tensors[repeated]}
        consumed.append(True)

    with pytest.raises(ValueError, match="do not fit the rollout model") as caught:
        engine.update_weights(stream, version=2)
    assert consumed
    for claim in (
        "lm_head.weight is no part of a Qwen3ForCausalLM of 2 layers",
        f"{missing} is missing",
        f"{misshapen} has shape [32, 64], but config.json makes it [64, 32]",
        f"{repeated} was received twice",
    ):
        assert claim in str(caught.value)
    with pytest.raises(RuntimeError, match="no weights"):
        generate(engine, make_prompts(3), sampling_of())
    engine.update_weights(weights_of(policy), version=3)
    assert engine.health() is None


def test_engine_without_weights_or_paused_does_not_generate(tmp_path: Path) -> None:
    policy = make_policy()
    policy.config.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    engine = LocalEngine(
        str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, max_batch=8
    )
    assert torch.equal(before, torch.get_rng_state()), "building an engine draws no random number"
    assert engine.health() is not None
    with pytest.raises(RuntimeError, match="no weights"):
        generate(engine, make_prompts(3), sampling_of())
    engine.update_weights(weights_of(policy), version=0)
    assert engine.health() is None
    engine.pause()
    with pytest.raises(RuntimeError, match="paused"):
        generate(engine, make_prompts(3), sampling_of())
    engine.resume()
    assert generate(engine, [], sampling_of()) == []
    assert generate(engine, make_prompts(3), sampling_of())[0][0].versions[0] == 0


def test_rank_that_cannot_generate_stops_all_ranks(tmp_path: Path) -> None:
    def on_a_rank(world: World) -> tuple[str, dict[str, list]]:
        engine = make_engine(make_policy(world.rank), tmp_path / str(world.rank), world=world)
        each = {
            name: tokens_of(groups)
            for name, groups in engine.sample_each(make_prompts(5), sampling_of()).items()
        }
        with pytest.raises(ValueError) as caught:
            engine.begin(make_prompts(3, 0 if world.rank else 2), sampling_of())
        return str(caught.value), each

    (message, each), (same_message, same) = as_ranks(2, on_a_rank)
    assert message == same_message == "Prompts without a token cannot be continued: [1]."
    assert each == same, "samples of every rank's engine, on every rank"
    assert (
        list(each) == ["local, rank 0", "local, rank 1"]
        and each["local, rank 0"] != each["local, rank 1"]
    )


def test_weights_that_are_not_numbers_stop_the_generation(tmp_path: Path) -> None:
    policy = make_policy()
    policy.model.norm.weight.data[0] = float("nan")
    with pytest.raises(
        UserError, match="version 1 give log-probabilities that are not finite"
    ) as caught:
        generate(make_engine(policy, tmp_path), make_prompts(3), sampling_of())
    assert (caught.value.setting, caught.value.value) == ("model.path", tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("attention_dropout", "x", "attention_dropout"),
        ("pad_token_id", 10**9, "Padding_idx"),
        ("attn_implementation", "x", "attn_implementation"),
    ],
)
def test_config_that_transformers_rejects_is_refused(
    name: str, value: object, problem: str, tmp_path: Path
) -> None:
    path = write_family(tmp_path, "LlamaForCausalLM", **{name: value})
    with pytest.raises(UserError, match=problem) as caught:
        load_engine(path)
    assert caught.value.setting == "model.path"


def test_group_larger_than_a_batch_is_refused(tmp_path: Path) -> None:
    engine = make_engine(make_policy(), tmp_path, max_batch=3)
    with pytest.raises(UserError, match=r"rollout\.max_batch = 3"):
        generate(engine, make_prompts(3), sampling_of(samples=4))


@pytest.mark.parametrize("family", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_states_of_delta_networks_follow_their_rows(family: str, tmp_path: Path) -> None:
    """Stop tokens end rows at all lengths; others take their places, in batches of eight rows and
    of all."""
    path = write_family(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    narrow, wide = (load_engine(path, max_batch=rows) for rows in (8, 64))
    prompts, sampling = (
        make_prompts(3, 40, 1, 6, 17, 33, 2, 25),
        sampling_of(stop=tuple(range(10)), temperature=1.7),
    )
    groups = generate(narrow, prompts, sampling)
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 5
    assert_logprobs_of_a_plain_forward(reference, prompts, groups, 1.7)
    assert tokens_of(generate(wide, prompts, sampling)) == tokens_of(groups)
