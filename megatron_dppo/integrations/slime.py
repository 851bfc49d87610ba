"""Pruning of completions in slime 0.3.1 and in miles: flags of their commands, no patch.

    --custom-reward-post-process-path megatron_dppo.integrations.slime.prune_rewards
    --custom-config-path pruning.yaml  # optional, with settings such as pruning_budget: 0.5

- The trainer converts samples to training data, and calls the hook before it reads the samples.
- A dropped sample becomes a stub of two tokens without loss. The stub keeps its rollout id, so that
  the loss's divisor, the steps and the schedule do not change.
- A kept sample's reward, which is its advantage there, is multiplied by 1/π.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.integrations.settings import Pruning
from megatron_dppo.rl.pruning import prune_candidates
from megatron_dppo.rl.pruning.completion_rules import CompletionCandidates
from megatron_dppo.rl.types import Bools, Floats

PROPORTIONAL = ("grpo", "gspo", "cispo")
"""Advantage estimators whose loss of a sample is proportional to the sample's reward."""
ICEPOP = (
    "slime.backends.megatron_utils.loss.icepop_function",
    "miles.backends.training_utils.loss_hub.corrections.icepop_function",
)
"""Importance corrections of slime and miles that read no other sample."""
MOST_ROUNDING = 0.01
"""Upper bound of an |advantage| of equal rewards; larger advantages are trained on."""
PER_TOKEN = (
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_routed_experts",
    "rollout_indexer_topk",
    "opd_reverse_kl",
)
"""Fields of a sample with one entry per token of the response, or per token but the first."""


@dataclass(frozen=True, slots=True)
class SlimePruning(Pruning):
    """Settings of pruning, named ``pruning_…`` in the file of ``--custom-config-path``."""

    budget: float | Literal["auto"] = "auto"
    """Fraction of the tokens trained on, or each step's fraction of least variance × time."""
    training_fraction: float = 0.2
    """Training's fraction of an unpruned step's time, log-probability passes included; for
    ``auto``, which cannot prune generation."""
    reward_post_process_path: str | None = None
    """Function for ``--custom-reward-post-process-path`` without pruning."""

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a setting is out of range.
        """
        Pruning.__post_init__(self)
        fraction = self.training_fraction
        if not (isinstance(fraction, int | float) and 0.0 < fraction <= 1.0):
            remedy = "Give more than 0, at most 1"
            raise UserError("pruning.training_fraction", fraction, "is no fraction", remedy)


class Rows(NamedTuple):
    """Samples of a rollout batch; the arrays are [samples]."""

    advantages: Floats
    """Rewards after the trainer's normalisation; 0 for rounding in groups of equal rewards."""
    counted: Floats
    """Tokens with a loss."""
    squares: Floats
    """Estimated squared norm of the gradient, Σ_t (1 − p_t)² over the counted tokens."""
    tokens: Floats
    """Tokens of prompt and response."""


def prune_rewards(args: Any, samples: list[Any]) -> tuple[list[Any], list[float]]:
    """Replace dropped samples in the list by stubs; return raw rewards, and weighted rewards.

    Args:
        args: arguments of slime or miles.
        samples: samples of a rollout batch, in the order of training.

    Raises:
        UserError: a setting is out of range, or biases the gradient of a pruned batch.
    """
    pruning = read_pruning_settings(args)
    raw, rewards = _post_process_rewards(args, pruning.reward_post_process_path, samples)
    is_flat = _find_flat_groups(samples, raw, rewards)
    rows = _measure(samples, np.where(is_flat, 0.0, rewards))
    rollouts = _group_rollouts(samples)
    size = args.global_batch_size
    weights = np.zeros(len(samples))
    inflations = [1.0]
    # Draw for each step separately, because the parameters depend on the last step's draw. The
    # trainer drops rollouts that fill no step.
    for start in range(0, len(rollouts) - size + 1, size):
        step = rollouts[start : start + size]
        drawn, inflation = _draw_rollouts(args, pruning, samples, rows, step)
        for members, weight in zip(step, drawn.tolist(), strict=True):
            weights[members] = weight
        inflations.append(inflation)
    kept = weights > 0.0
    for place in np.flatnonzero(~kept):
        # A sample without a response has no tokens to cut.
        if samples[place].response_length > 0:
            samples[place] = _make_stub(samples[place])
    logging.getLogger(__name__).info(
        "pruning: %.0f%% of the completions and %.0f%% of the tokens are trained on, "
        "variance inflation %.2f, largest weight %.2f",
        100.0 * kept.mean(),
        100.0 * rows.tokens[kept].sum() / rows.tokens.sum(),
        np.mean(inflations[1:] or inflations),
        weights.max(),
    )
    return raw, (np.asarray(rewards) * weights).tolist()


def _post_process_rewards(
    args: Any, path: str | None, samples: list[Any]
) -> tuple[list[Any], list[float]]:
    """Return raw rewards and advantages, by the trainer's own function or the user's."""
    project = type(samples[0]).__module__.partition(".")[0]
    hook = import_module(f"{project}.utils.misc").load_function(path) if path else None
    if project == "miles":
        conversion = import_module("miles.ray.rollout.train_data_conversion")
        raw, rewards = conversion._post_process_rewards(args, samples, hook)
    else:
        actor = import_module("slime.ray.rollout").RolloutManager
        manager = SimpleNamespace(args=args, custom_reward_post_process_func=hook)
        # Ray replaces the decorated class; its methods stay on the original class.
        manager_class = actor.__ray_metadata__.modified_class
        raw, rewards = manager_class._post_process_rewards(manager, samples)
    return list(raw), list(rewards)


def _find_flat_groups(samples: list[Any], raw: list[Any], rewards: list[float]) -> Bools:
    """Return a mask of samples whose group has equal rewards, and whose advantage is rounding."""
    values: dict[Any, list[Any]] = {}
    for sample, value in zip(samples, raw, strict=True):
        values.setdefault(sample.group_index, []).append(value)
    is_equal = {group: own.count(own[0]) == len(own) for group, own in values.items()}
    equal = np.array([is_equal[sample.group_index] for sample in samples])
    return equal & (np.abs(rewards) <= MOST_ROUNDING)


def _group_rollouts(samples: list[Any]) -> list[list[int]]:
    """Return the places of each rollout's samples, which share a divisor and are kept together."""
    rollouts: dict[Any, list[int]] = {}
    for place, sample in enumerate(samples):
        rollout_id = sample.rollout_id
        key = ("sample", place) if rollout_id is None else rollout_id
        rollouts.setdefault(key, []).append(place)
    return list(rollouts.values())


def _measure(samples: list[Any], advantages: Floats) -> Rows:
    counted = np.zeros(len(samples))
    squares = np.zeros(len(samples))
    for place, sample in enumerate(samples):
        if sample.remove_sample:
            continue
        given = sample.loss_mask
        mask = np.ones(sample.response_length) if given is None else np.asarray(given, np.float64)
        logprobs = sample.rollout_log_probs
        # Without log-probabilities, every token counts equally.
        per_token = np.ones(len(mask)) if logprobs is None else np.expm1(logprobs) ** 2
        counted[place] = mask.sum()
        squares[place] = per_token @ mask
    tokens = np.array([len(sample.tokens) for sample in samples], np.float64)
    return Rows(advantages, counted, squares, tokens)


def _draw_rollouts(
    args: Any,
    pruning: SlimePruning,
    samples: list[Any],
    rows: Rows,
    rollouts: Sequence[list[int]],
) -> tuple[Floats, float]:
    """Draw the rollouts of a step.

    Args:
        rollouts: [rollouts], places of each rollout's samples.

    Returns:
        The weights [rollouts], 0 if dropped, and the estimated inflation of the variance.
    """

    def add(values: Floats) -> Floats:
        return np.array([values[members].sum() for members in rollouts])

    size = np.sqrt(add(rows.advantages**2 * rows.squares))
    divisor = 1.0 if args.calculate_per_token_loss else np.maximum(add(rows.counted), 1.0)
    groups = np.array([samples[members[0]].group_index or 0 for members in rollouts])
    # Neighbours are rarely kept together: this order spreads the draw over prompts.
    order = np.lexsort((add(rows.advantages * rows.counted), groups))
    cost = add(rows.tokens)
    # A sampled probability of 1 has an estimated norm of 0, but may have a gradient.
    has_gradient = add(np.abs(rows.advantages) * rows.counted) > 0.0
    candidates = CompletionCandidates(
        advantage=size[order, None],
        score=(size / divisor)[order, None],
        cost=cost[order, None],
        floor=np.full((len(order), 1), 1.0 / pruning.max_weight),
        zero_advantage=~has_gradient[order, None],
    )
    indices = [samples[place].index for members in rollouts for place in members]
    if None in indices:
        problem = "is no seed of a step's draw"
        raise UserError("sample.index", None, problem, "Keep the index in your rollout function")
    kept, inclusion = prune_candidates(
        candidates,
        pruning.budget,
        rule=pruning.rule,
        # Time outside of training, in tokens trained on.
        generated=cost.sum() * (1.0 / pruning.training_fraction - 1.0),
        seed=[pruning.seed, *indices],
    )
    weights = np.zeros(len(order))
    weights[order] = kept.weights[:, 0]
    if args.calculate_per_token_loss:
        # The loss divides by the tokens sent. A sample counts at least once, and so does a stub.
        whole = add(np.maximum(rows.counted, 1.0))
        stubs = np.array([len(members) for members in rollouts])
        weights *= np.where(weights > 0.0, whole, stubs).sum() / whole.sum()
    squares = candidates.score**2
    live = (inclusion > 0.0) & (squares > 0.0)
    inflation = (squares[live] / inclusion[live]).sum() / squares[live].sum() if live.any() else 1.0
    return weights, float(inflation)


def _make_stub(sample: Any) -> Any:
    """Return a copy with two tokens; the second token is a response without loss."""
    stub = copy.copy(sample)
    stub.tokens = [sample.tokens[0], sample.tokens[-1]]
    stub.response_length = 1
    stub.loss_mask = [0]
    stub.multimodal_train_inputs = None
    fields = vars(sample)
    for name in PER_TOKEN:
        if fields.get(name) is not None:
            setattr(stub, name, fields[name][:1])
    offsets = fields.get("rollout_top_p_token_offsets")
    if offsets is not None:
        stub.rollout_top_p_token_offsets = offsets[:2]
        stub.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[: int(offsets[1])]
    return stub


def read_pruning_settings(args: Any) -> SlimePruning:
    """Read ``pruning_…`` from the arguments of slime or miles.

    Raises:
        UserError: a setting of pruning is wrong, or an argument biases the gradient.
    """
    given = vars(args)
    known = [name for name in SlimePruning.__dataclass_fields__ if name != "rule"]
    settings = {}
    for name, value in given.items():
        if name.startswith("pruning_"):
            own = name.removeprefix("pruning_")
            if own not in known:
                choices = ", ".join(f"pruning_{each}" for each in known)
                raise UserError(name, value, "is no setting", f"Choose from {choices}")
            settings[own] = value
    pruning = SlimePruning(**settings)
    term = "adds a term to the loss that no weight reaches"
    unknown = "is not known to keep a sample's loss proportional to its reward"
    size = "makes the steps' rollouts unknown to the hook"
    kl = given.get("use_kl_loss") and given.get("kl_loss_coef")
    balance = np.any(given.get("moe_aux_loss_coeff") or 0.0)
    tis = given.get("custom_tis_function_path")
    refused = [
        (args.advantage_estimator not in PROPORTIONAL, "advantage_estimator", unknown,
         f"Choose from {', '.join(PROPORTIONAL)}"),
        (args.loss_type != "policy_loss", "loss_type", unknown, "Set it to policy_loss"),
        (given.get("custom_advantage_function_path"), "custom_advantage_function_path",
         unknown, "Leave it out"),
        (given.get("custom_pg_loss_reducer_function_path"),
         "custom_pg_loss_reducer_function_path", unknown, "Leave it out"),
        (tis and tis not in ICEPOP, "custom_tis_function_path", unknown,
         f"Choose from {', '.join(ICEPOP)}, or leave it out"),
        (args.normalize_advantages, "normalize_advantages",
         "normalises over the samples drawn", "Leave it out"),
        (kl, "kl_loss_coef", term, "Set it to 0"),
        (args.entropy_coef, "entropy_coef", term, "Set it to 0"),
        (given.get("use_opd"), "use_opd", term, "Leave it out"),
        (given.get("enable_mtp_training"), "enable_mtp_training", term, "Leave it out"),
        (balance, "moe_aux_loss_coeff", term, "Set it to 0"),
        (given.get("moe_z_loss_coeff"), "moe_z_loss_coeff", term, "Leave it out"),
        (given.get("use_dynamic_global_batch_size"), "use_dynamic_global_batch_size", size,
         "Leave it out"),
        (given.get("multi_lora"), "multi_lora", size, "Leave it out"),
        (not args.use_dynamic_batch_size, "use_dynamic_batch_size",
         "is off: stubs take the places of samples in micro-batches, and little time is saved",
         "Add it, with --max-tokens-per-gpu"),
    ]  # fmt: skip
    for wrong, name, problem, remedy in refused:
        if wrong:
            flag = "--" + name.replace("_", "-")
            raise UserError(flag, given.get(name), problem, remedy)
    return pruning
