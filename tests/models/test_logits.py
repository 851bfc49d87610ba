"""Law 3: logits and log-probabilities equal transformers' for the same weights, packed or not, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.bridge.load import load_policy
from megatron_dppo.bridge.stream import weight_stream
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.context import share_of
from megatron_dppo.models.policy import PolicyModel, build_policy, packed_sequence
from megatron_dppo.models.policy_head import HeadOutput
from megatron_dppo.models.shape import check_layout, read_shape
from megatron_dppo.parallel.world import World, initialize
from tests.bridge.conversions import policy_tensors
from tests.bridge.directories import SMOLLM2, Sizes, write_llama, write_qwen3_moe
from tests.policies import write_policy
from tests.ranks import RankPool

Arrays = dict[str, np.ndarray]

LENGTHS = (7, 1, 20, 5, 16, 3)
"""Of the pack's segments; 52 tokens in all, which two ranks divide."""
TEMPERATURE = 0.7
LAYOUTS = {
    "TP1": LayoutConfig(),
    "TP2": LayoutConfig(tp=2),
    "TP2+SP": LayoutConfig(tp=2, sequence_parallel=True),
    "PP2": LayoutConfig(pp=2),
    "TP2xPP2+SP": LayoutConfig(tp=2, pp=2, sequence_parallel=True),
    "CP2": LayoutConfig(cp=2),
    "CP2xPP2": LayoutConfig(cp=2, pp=2),
    "TP2xCP2+SP": LayoutConfig(tp=2, cp=2, sequence_parallel=True),
    "DP2": LayoutConfig(dp=2),
    "TP3": LayoutConfig(tp=3),
}


POLICIES: dict[str, Callable[[Path], object]] = {
    "tied": partial(write_policy, tied=True),
    "a rank of padding alone": partial(write_policy, vocab=50),
    "experts whose weights do not sum to one": partial(write_qwen3_moe, sizes=Sizes(), renormalises=False),
    "SmolLM2": partial(write_llama, sizes=SMOLLM2),
}
"""Besides each family, which ``tests/test_families.py`` has untied. An odd vocabulary, padded to 256 or 128 rows; 50
tokens leave the second of two ranks nothing but padding."""


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    POLICIES[request.param](path)
    return path


def build(path: Path, layout: LayoutConfig, **settings: Any) -> tuple[PolicyModel, World]:
    world = initialize(layout, seed=1, timeout_s=60)
    shape, model = read_shape(path), ModelConfig(path=str(path), **settings)
    (policy,) = build_policy(shape, model, layout, temperature=TEMPERATURE)
    load_policy([policy], path, world)
    return policy, world


def pack(lengths: tuple[int, ...], vocab: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Token ids and positions, [1, T], and the pack's description; the same tokens for the same lengths.

    Token 0 is left out: it is the padding token, for which transformers keeps no gradient.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, vocab, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = np.cumsum((0, *lengths), dtype=np.int32)
    return ids, positions, packed_sequence(starts, max(lengths), torch.device("cpu"))


def lengths_in(layout: LayoutConfig) -> tuple[int, ...]:
    """The segments as long as the layout's chunks need them."""
    return tuple(-(-length // layout.row_multiple) * layout.row_multiple for length in LENGTHS)


def targets_of(ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """A target for every position, anywhere in the vocabulary, its last tokens included."""
    return (ids[0] * 7 + vocab - 1) % vocab


def score(policy: PolicyModel, lengths: tuple[int, ...]) -> list[Arrays]:
    """What the head says of every position, through Megatron's own schedule; empty but on the last stage."""
    vocab = policy.shape.vocab_size
    ids, positions, packed = pack(lengths, vocab)

    def forward(batches: Any, module: torch.nn.Module) -> Any:
        output = module(
            ids,
            positions,
            packed_seq_params=packed,
            predictors=torch.arange(ids.shape[1]),
            targets=targets_of(ids, vocab),
            score_norm=True,
        )
        names = [name for name in HeadOutput._fields if name != "divergence"]
        return output, lambda out: (out[0].sum(), torch.zeros((), dtype=torch.int), dict(zip(names, out, strict=True)))

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([None]),
            model=policy,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    return [{name: value.numpy() for name, value in output.items()} for output in outputs]


def score_and_logits(rank: int, size: int, path: Path, layout: LayoutConfig) -> tuple[list[Arrays], np.ndarray | None]:
    policy, _ = build(path, layout, spec="torch", head_chunk_mib=1)
    policy.eval()
    logits = None
    if layout.pp == 1:
        logits = policy.logits(*pack(lengths_in(layout), policy.shape.vocab_size)).numpy()
    return score(policy, lengths_in(layout)), logits


class NoValueRead(TorchDispatchMode):
    """Refuses what on CUDA makes the host wait: asking how many values there are, or what one is. Not of the layers:
    those that run on a CPU split by lengths, Transformer Engine's do not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default), function
        return function(*args, **(kwargs or {}))


def score_without_reading(rank: int, size: int, path: Path, layout: LayoutConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of some targets when the host has said what this rank holds, and when it has not."""
    policy, world = build(path, layout)
    lengths = lengths_in(layout)
    ids, positions, packed = pack(lengths, policy.shape.vocab_size)
    predictors = torch.arange(1, ids.shape[1], 3)
    scored = {"predictors": predictors, "targets": targets_of(ids, policy.shape.vocab_size)[predictors]}
    share = share_of(lengths, predictors, world.cp_rank, layout.cp) if layout.cp > 1 else None
    layers = policy._hidden

    def unwatched(*arguments: Any) -> torch.Tensor:
        with _disable_current_modes():
            return layers(*arguments)

    with NoValueRead(), mock.patch.object(policy, "_hidden", unwatched):
        told, _ = policy(ids, positions, packed, **scored, share=share)
    told.sum().backward()
    asked, _ = policy(ids, positions, packed, **scored)
    return told.detach(), asked.detach()


@pytest.mark.parametrize("cp", [1, 2])
def test_a_pass_reads_no_value_of_a_pack(ranks: RankPool, tmp_path: Path, cp: int) -> None:
    for told, asked in ranks.run(cp, score_without_reading, write_policy(tmp_path), LayoutConfig(cp=cp)):
        assert torch.equal(told, asked) and told.any()


def reference_logits(path: Path, lengths: tuple[int, ...]) -> torch.Tensor:
    """[T, vocabulary]: every segment by itself, as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids, _, _ = pack(lengths, model.config.vocab_size)
    with torch.no_grad():
        return torch.cat([model(segment[None]).logits[0] for segment in ids[0].split(lengths)])


def reference_scores(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    logprobs = torch.log_softmax(logits.double() / TEMPERATURE, dim=-1)
    error = torch.nn.functional.one_hot(targets, logits.shape[1]) - logprobs.exp()
    return {
        "logprobs": logprobs.gather(1, targets[:, None])[:, 0],
        "entropy": -(logprobs.exp() * logprobs).sum(dim=1),
        "score_norm": error.norm(dim=1),
    }


def test_policy_equals_transformers_in_every_layout(ranks: RankPool, policy: Path) -> None:
    assert_equal_in_every_layout(ranks, policy)


def assert_equal_in_every_layout(ranks: RankPool, policy: Path) -> None:
    """Those of :data:`LAYOUTS` that the policy can be cut into."""
    tried = [layout for layout in LAYOUTS.values() if can_be_cut(policy, layout)]
    assert len(tried) > 5
    for size in (1, 2, 3, 4):
        layouts = [each for each in tried if each.tp * each.pp * each.cp * (each.dp or 1) == size]
        calls = [(score_and_logits, policy, layout) for layout in layouts]
        for layout, results in zip(layouts, ranks.in_turn(size, *calls) if calls else [], strict=True):
            assert_equal_to_transformers(policy, layout, results)


def can_be_cut(policy: Path, layout: LayoutConfig) -> bool:
    try:
        check_layout(read_shape(policy), layout)
    except UserError:
        return False
    return True


def assert_equal_to_transformers(
    policy: Path, layout: LayoutConfig, results: list[tuple[list[Arrays], np.ndarray | None]]
) -> None:
    logits = reference_logits(policy, lengths_in(layout))
    ids, _, _ = pack(lengths_in(layout), logits.shape[1])
    expected = reference_scores(logits, targets_of(ids, logits.shape[1]))
    scored = [output for outputs, _ in results for output in outputs]
    ranks_of_a_stage = layout.tp * layout.cp * (layout.dp or 1)
    assert len(scored) == ranks_of_a_stage, "every rank of the last stage, and no other, has scores"
    for output in scored:
        for field, value in expected.items():
            np.testing.assert_allclose(output[field], value, atol=5e-5, err_msg=f"{field} in {layout}")
    for _, ours in results:
        if layout.pp == 1:
            np.testing.assert_allclose(ours, logits, atol=5e-5, err_msg=f"logits in {layout}")


def test_a_pack_whose_longest_segment_is_misstated_is_refused() -> None:
    with pytest.raises(ValueError, match="the longest segment has 20 tokens"):
        packed_sequence(np.array([0, 20, 30], np.int32), 30, torch.device("cpu"))


def sum_of_logprobs(policy: PolicyModel) -> torch.Tensor:
    """Of every position's target, each with a weight of its own."""
    policy.train()
    vocab = policy.shape.vocab_size
    ids, positions, packed = pack(LENGTHS, vocab)
    logprobs, *_ = policy(ids, positions, packed, torch.arange(ids.shape[1]), targets_of(ids, vocab))
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


def streamed_gradients(
    rank: int, size: int, path: Path, layout: LayoutConfig, recompute: str
) -> dict[str, torch.Tensor]:
    """Under Hugging Face's names: gradients take the way of the weights."""
    policy, world = build(path, layout, recompute=recompute)
    sum_of_logprobs(policy).backward()
    for parameter in policy.parameters():
        parameter.data.copy_(parameter.grad)
    for holder in (policy.embedding.word_embeddings, policy.output_layer):
        assert holder.weight is None or not holder.weight[policy.shape.vocab_size :].any(), "padding has a gradient"
    return {n: t.clone() for bucket in weight_stream([policy], world) for n, t in bucket.items()}


def reference_gradients(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """Likewise: transformers writes them to ``out`` as if they were weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    vocab = model.config.vocab_size
    ids, _, _ = pack(LENGTHS, vocab)
    logits = torch.cat([model(segment[None]).logits[0] for segment in ids[0].split(LENGTHS)])
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1).gather(1, targets_of(ids, vocab)[:, None])[:, 0]
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    model.save_pretrained(out)
    return policy_tensors(out, read_shape(path))


def test_gradients_equal_those_of_transformers_whatever_is_recomputed(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    assert_gradients_equal(ranks, policy, tmp_path)


def assert_gradients_equal(ranks: RankPool, policy: Path, out: Path, *, most: float = 2e-5) -> None:
    """``most`` is a difference over the tensor's largest gradient."""
    theirs = reference_gradients(policy, out)
    ways = ("none", "selective", "full")
    calls = [(streamed_gradients, policy, LayoutConfig(), recompute) for recompute in ways]
    for recompute, [ours] in zip(ways, ranks.in_turn(1, *calls), strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            scale = gradient.abs().max().item()
            np.testing.assert_allclose(ours[name], gradient, atol=most * scale, err_msg=f"{name}, {recompute}")
