"""The local engine, on a small Qwen3 with grouped queries, q/k norms and weights large enough to prefer some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout import decoding
from megatron_dppo.rollout.decoder import Decoder, RolloutCache
from megatron_dppo.rollout.engine import Bucket, Sampling, WeightSource, generate
from megatron_dppo.rollout.local import LocalEngine
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.rollout.scripted import as_ranks

VOCABULARY = 40
STOP = (3, 7)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_policy(seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    policy = Qwen3ForCausalLM(config)
    for name, parameter in policy.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return policy.to(dtype=dtype).eval()


def source_of(tensors: Mapping[str, torch.Tensor], size: int = 5) -> WeightSource:
    def source(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        assert to is Consumers.EVERYONE, "every rank has an engine"
        items = list(tensors.items())
        for start in range(0, len(items), size):
            yield dict(items[start : start + size])

    return source


def weights_of(policy: PreTrainedModel) -> WeightSource:
    return source_of(dict(policy.named_parameters()))


def make_engine(
    policy: Qwen3ForCausalLM,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_batch: int = 64,
    world: World | None = None,
) -> LocalEngine:
    policy.config.save_pretrained(path)
    engine = LocalEngine(path, device=torch.device("cpu"), dtype=dtype, max_batch=max_batch, world=world)
    engine.update_weights(weights_of(policy), version=1)
    return engine


def make_prompts(*lengths: int, first_id: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(1)
    return [
        Prompt(id=first_id + row, token_ids=rng.integers(8, VOCABULARY, length).astype(np.int32), text="", label="")
        for row, length in enumerate(lengths)
    ]


def sampling_of(
    samples: int = 4, max_tokens: int = 24, temperature: float = 1.0, stop: tuple[int, ...] = STOP, seed: int = 5
) -> Sampling:
    return Sampling(samples=samples, max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop, seed=seed)


def tokens_of(groups: list[tuple[Completion, ...]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


@torch.no_grad()
def plain_logprobs(policy: PreTrainedModel, prompt: Prompt, completion: Completion, temperature: float) -> np.ndarray:
    """A forward over prompt and completion, alone, unpadded and without a cache."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int64))
    logits = policy(input_ids=ids[None]).logits[0, len(prompt.token_ids) - 1 : -1].float()
    chosen = torch.from_numpy(completion.token_ids.astype(np.int64))
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, chosen[:, None])[:, 0].numpy()


def assert_logprobs_of_a_plain_forward(
    policy: PreTrainedModel, prompts: list[Prompt], groups: list[tuple[Completion, ...]], temperature: float
) -> None:
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(policy, prompt, completion, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(tmp_path: Path, tied: bool) -> None:
    policy = make_policy(tied=tied)
    prompts = make_prompts(3, 11, 1, 6)
    groups = generate(make_engine(policy, tmp_path), prompts, sampling_of(temperature=1.7))
    assert [len(group) for group in groups] == [4] * 4
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 4
    assert_logprobs_of_a_plain_forward(policy, prompts, groups, 1.7)


def test_the_experts_of_every_token_but_the_last_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    """Of completions of every length, some of which leave the batch before the others."""
    shape = write_qwen3_moe(tmp_path, Sizes()).routing
    engine = LocalEngine(tmp_path, device=torch.device("cpu"), dtype=torch.float32, max_batch=8)
    engine.update_weights(source_of(load_file(tmp_path / "model.safetensors")), version=1)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts, asked = make_prompts(3, 11, 1, 6), replace(sampling_of(stop=tuple(range(40))), routing=shape)
    groups = generate(engine, prompts, asked)
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 4
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            tokens = np.concatenate([prompt.token_ids, completion.token_ids])[:-1].astype(np.int64)
            with torch.no_grad():
                logits = policy(torch.from_numpy(tokens)[None], output_router_logits=True).router_logits
            experts = torch.stack([layer.topk(shape.per_token).indices for layer in logits], dim=1)
            assert completion.routing is not None
            assert completion.routing.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(completion.routing), np.sort(experts.numpy()))
    plain = generate(engine, prompts, replace(asked, routing=None))
    assert tokens_of(plain) == tokens_of(groups)
    assert all(completion.routing is None for group in plain for completion in group)


def test_greedy_equals_transformers_generate(tmp_path: Path) -> None:
    policy = make_policy()
    prompts, stop = make_prompts(4, 9, 2, 7, 5), tuple(range(0, VOCABULARY, 4))
    groups = generate(make_engine(policy, tmp_path), prompts, sampling_of(samples=2, temperature=0.0, stop=stop))
    lengths = set()
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        expected = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=list(stop),
            pad_token_id=0,
        )[0, ids.shape[1] :]
        lengths.add(len(expected))
        for completion in group:
            assert completion.token_ids.tolist() == expected.tolist()
            np.testing.assert_allclose(completion.logprobs, plain_logprobs(policy, prompt, completion, 1.0), atol=1e-5)
    assert len(lengths) > 2, "answers must end at various places for the test to mean something"


def test_a_completion_does_not_depend_on_its_company(tmp_path: Path) -> None:
    engine = make_engine(make_policy(dtype=torch.float64), tmp_path, dtype=torch.float64)
    prompts = make_prompts(3, 11, 1, 6, 6, 4)
    together = tokens_of(generate(engine, prompts, sampling_of()))
    alone = [tokens_of(generate(engine, [prompt], sampling_of()))[0] for prompt in prompts]
    backwards = tokens_of(generate(engine, prompts[::-1], sampling_of()))[::-1]
    fewer = tokens_of(generate(engine, prompts, sampling_of(samples=2)))
    assert together == alone == backwards
    assert [group[:2] for group in together] == fewer


@pytest.mark.parametrize("width", [1, 20])
def test_what_all_prompts_begin_with_is_read_once_and_changes_no_completion(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts end within the common beginning but for one token, or go on for a while."""
    engine = make_engine(policy := make_policy(dtype=torch.float64), tmp_path, dtype=torch.float64, max_batch=20)
    (message,) = make_prompts(width + 30)
    rests = [make_prompts(length)[0].token_ids[-length:] for length in (1, 4, width)]
    prompts = [
        replace(message, id=number, token_ids=np.concatenate([message.token_ids[: width + 15], rest]))
        for number, rest in enumerate(rests)
    ]
    shapes = shapes_read(monkeypatch)
    together = generate(engine, prompts, sampling_of())
    assert shapes[0] == (1, width + 15), "the common tokens, for one row"
    assert max(tokens for rows, tokens in shapes[1:]) <= max(width, 4), "and never again"
    for prompt, group in zip(prompts, together, strict=True):
        assert_logprobs_of_a_plain_forward(policy, [prompt], [group], 1.0)
    monkeypatch.setattr(decoding, "LEAST_COMMON", 1000)
    assert tokens_of(together) == tokens_of(generate(engine, prompts, sampling_of()))


def test_small_batches_give_the_same_completions_in_the_order_asked(tmp_path: Path) -> None:
    policy = make_policy(dtype=torch.float64)
    prompts = make_prompts(3, 11, 1, 6, 6, 4, 2)
    wide = make_engine(policy, tmp_path, dtype=torch.float64, max_batch=64)
    narrow = make_engine(policy, tmp_path, dtype=torch.float64, max_batch=9)
    assert tokens_of(generate(wide, prompts, sampling_of())) == tokens_of(generate(narrow, prompts, sampling_of()))


def shapes_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of every call of the decoder, as they come."""
    shapes: list[tuple[int, int]] = []
    read = Decoder.read

    def noted(decoder: Decoder, cache: RolloutCache, tokens: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        rows, count = tokens.shape
        shapes.append((rows, count))
        return read(decoder, cache, tokens, *rest, **more)

    monkeypatch.setattr(Decoder, "read", noted)
    return shapes


def test_no_batch_is_larger_than_asked_and_every_prompt_is_prefilled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_policy(), tmp_path, max_batch=9)
    shapes = shapes_read(monkeypatch)
    groups = generate(engine, make_prompts(3, 11, 2, 6, 6), sampling_of())
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    assert sum(rows for rows, width in shapes if width > 1) == 5
    assert 8 <= max(rows for rows, _ in shapes) <= 9
    # A completion's first token comes from the prefill; one that has ended is not decoded any further.
    assert sum(rows for rows, width in shapes if width == 1) == sum(lengths) - len(lengths)


def test_looking_seldom_for_ended_rows_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host looks at every 16th token only; what rows have made past their end by then is cut off."""
    engine = make_engine(make_policy(dtype=torch.float64), tmp_path, dtype=torch.float64, max_batch=9)
    prompts = make_prompts(3, 11, 2, 6, 6)
    always = tokens_of(generate(engine, prompts, sampling_of()))
    monkeypatch.setitem(decoding.ROUND, "cpu", 5)
    seldom = generate(engine, prompts, sampling_of())
    assert tokens_of(seldom) == always
    assert {completion.finish_reason for group in seldom for completion in group} == {"stop", "length"}


def test_the_seed_decides(tmp_path: Path) -> None:
    engine = make_engine(make_policy(), tmp_path)
    prompts = make_prompts(5, 8)
    first, again = (generate(engine, prompts, sampling_of(seed=5)) for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    for one, other in zip(sum(first, ()), sum(again, ()), strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert tokens_of(first) != tokens_of(generate(engine, prompts, sampling_of(seed=6)))
    assert len({tuple(completion) for completion in tokens_of(first)[0]}) == 4, "samples of a group must differ"


def test_first_tokens_are_distributed_as_the_policy_says(tmp_path: Path) -> None:
    policy, samples, temperature = make_policy(), 2048, 1.3
    prompt = make_prompts(5)[0]
    engine = make_engine(policy, tmp_path, max_batch=samples)
    (group,) = generate(engine, [prompt], sampling_of(samples=samples, max_tokens=1, temperature=temperature))
    counts = np.bincount([completion.token_ids[0] for completion in group], minlength=VOCABULARY)
    with torch.no_grad():
        logits = policy(input_ids=torch.from_numpy(prompt.token_ids.astype(np.int64))[None]).logits[0, -1]
    expected = samples * torch.softmax(logits / temperature, dim=-1).double().numpy()
    frequent = expected >= 5
    cells = [
        *zip(counts[frequent], expected[frequent], strict=True),
        (counts[~frequent].sum(), expected[~frequent].sum()),
    ]
    degrees = len(cells) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert degrees > 8
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(tmp_path: Path) -> None:
    engine = make_engine(make_policy(), tmp_path)
    completions = sum(generate(engine, make_prompts(5, 8, 2), sampling_of(samples=8, max_tokens=12)), ())
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        tokens = completion.token_ids.tolist()
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(tokens) == len(completion.logprobs)
        assert not set(tokens[:-1]) & set(STOP)
        assert (tokens[-1] in STOP) == (completion.finish_reason == "stop")
        assert len(tokens) == 12 or completion.finish_reason == "stop"


@pytest.mark.parametrize("least", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_likeliest_token_alone_is_greedy_at_any_temperature(tmp_path: Path, least: dict[str, float]) -> None:
    policy, prompts = make_policy(), make_prompts(5, 8, 2)
    engine, hot = make_engine(policy, tmp_path), sampling_of(temperature=1.7)
    greedy = generate(engine, prompts, sampling_of(temperature=0.0))
    groups = generate(engine, prompts, replace(hot, **least))
    assert tokens_of(groups) == tokens_of(greedy) != tokens_of(generate(engine, prompts, hot))
    assert_logprobs_of_a_plain_forward(policy, prompts, groups, 1.7)


def test_an_update_changes_tokens_and_version(tmp_path: Path) -> None:
    engine, prompts = make_engine(make_policy(0), tmp_path), make_prompts(5, 8)
    before = generate(engine, prompts, sampling_of())
    other = make_policy(9)
    engine.pause()
    engine.update_weights(weights_of(other), version=2)
    engine.resume()
    after = generate(engine, prompts, sampling_of())
    assert tokens_of(before) != tokens_of(after)
    for groups, version in ((before, 1), (after, 2)):
        for completion in sum(groups, ()):
            assert completion.versions == (VersionSpan(version, len(completion.token_ids)),)
    completion = after[1][2]
    expected = plain_logprobs(other, prompts[1], completion, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_a_stream_that_does_not_fit_is_consumed_then_refused_by_name(tmp_path: Path) -> None:
    policy = make_policy()
    engine = make_engine(policy, tmp_path)
    tensors = dict(policy.named_parameters())
    missing, misshapen, repeated = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    consumed = []

    def stream(*, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        yield {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}
        yield {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        yield {name: tensor for name, tensor in tensors.items() if name not in (missing, misshapen)}
        yield {misshapen: torch.zeros(32, 64)}
        yield {repeated: tensors[repeated]}
        consumed.append(True)

    with pytest.raises(ValueError) as caught:
        engine.update_weights(stream, version=2)
    assert consumed
    message = str(caught.value)
    for claim in (
        "model.layers.7.mlp.up_proj.weight is not in the model",
        "lm_head.weight is not in the model",
        f"{missing} is missing",
        f"{misshapen} has shape [32, 64], not [64, 32]",
        f"{repeated} came twice",
    ):
        assert claim in message
    assert message.count("missing") == 1
    with pytest.raises(RuntimeError, match="no weights"):
        generate(engine, make_prompts(3), sampling_of())
    engine.update_weights(weights_of(policy), version=3)
    assert engine.health() is None


def test_nothing_is_generated_before_the_first_update_or_while_paused(tmp_path: Path) -> None:
    policy = make_policy()
    policy.config.save_pretrained(tmp_path)
    engine = LocalEngine(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, max_batch=8)
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
    assert generate(engine, make_prompts(3), sampling_of())[0][0].versions[0].version == 0


def test_what_is_begun_keeps_the_weights_that_it_was_begun_with(tmp_path: Path) -> None:
    engine, prompts = make_engine(make_policy(0), tmp_path), make_prompts(5, 8)
    expected = generate(engine, prompts, sampling_of())
    pending = engine.begin(prompts, sampling_of())
    engine.pause()
    engine.update_weights(weights_of(make_policy(9)), version=2)
    groups = engine.finish(pending)
    assert tokens_of(groups) == tokens_of(expected)
    assert {span.version for group in groups for completion in group for span in completion.versions} == {1}


def test_a_rank_that_cannot_generate_stops_all_of_them_when_they_wait(tmp_path: Path) -> None:
    def on_a_rank(world: World) -> tuple[str, dict[str, list]]:
        engine = make_engine(make_policy(world.rank), tmp_path / str(world.rank), world=world)
        each = {name: tokens_of(groups) for name, groups in engine.sample_each(make_prompts(5), sampling_of()).items()}
        pending = engine.begin(make_prompts(3, 0 if world.rank else 2), sampling_of())  # which does not raise
        with pytest.raises(ValueError) as caught:
            engine.finish(pending)
        return str(caught.value), each

    (message, each), (same_message, same) = as_ranks(2, on_a_rank)
    assert message == same_message == "Prompts without a token cannot be continued: [1]."
    assert each == same, "samples of every rank's engine, on every rank"
    assert list(each) == ["local, rank 0", "local, rank 1"] and each["local, rank 0"] != each["local, rank 1"]


def test_weights_that_are_not_numbers_stop_the_generation(tmp_path: Path) -> None:
    policy = make_policy()
    engine = make_engine(policy, tmp_path)
    policy.model.norm.weight.data[0] = float("nan")
    engine.update_weights(weights_of(policy), version=2)
    with pytest.raises(RuntimeError, match="version 2 give log-probabilities that are not finite"):
        generate(engine, make_prompts(3), sampling_of())


def test_mistakes_of_the_user_name_the_setting(tmp_path: Path) -> None:
    engine = make_engine(make_policy(), tmp_path, max_batch=3)
    with pytest.raises(UserError, match=r"rollout\.max_batch = 3"):
        generate(engine, make_prompts(3), sampling_of(samples=4))
    with pytest.raises(UserError, match=r"model\.path"):
        LocalEngine(tmp_path / "nowhere", device=torch.device("cpu"), dtype=torch.float32, max_batch=3)
    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], num_hidden_layers=2, use_sliding_window=True)
    config.save_pretrained(tmp_path / "sliding")
    with pytest.raises(UserError, match="use_sliding_window = true"):
        LocalEngine(tmp_path / "sliding", device=torch.device("cpu"), dtype=torch.float32, max_batch=3)
