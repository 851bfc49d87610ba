"""The user's functions in a step: objective, advantage estimator, and rules to keep prompts and
completions.

An objective receives :class:`~megatron_dppo.rl.losses.Tokens` of a pack: R tokens of several
completions. The return value is the quantity to maximise for each token, [R]; or a tuple of that
tensor and the clipped or masked tokens, [R] bool. A test before a run begins checks two properties
that pruning and packing rely on:

- The value of a completion depends on that completion alone, because packing is random.
- The gradient is 0 where the advantage is 0, because such completions are left out.

A rule is unrestricted, because its probabilities have a floor and weight the completions. The test
checks that the rule returns a probability for each candidate.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.config import Config, LossConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import FAILURES, load_function, wrap_function
from megatron_dppo.rl import advantages
from megatron_dppo.rl.advantages import ESTIMATORS
from megatron_dppo.rl.losses import Tokens, compute_token_losses
from megatron_dppo.rl.objectives import Objective, resolve_objective
from megatron_dppo.rl.pruning import completion_rules, prompt_rules
from megatron_dppo.rollout.engine import RolloutEngine

SETTING = "loss.objective"
ENGINE = "rollout.engine_function"
METHODS = ("begin", "finish", "sample_each", "take_events", "update_weights")
"""Methods that every engine must define; the remaining methods have empty defaults."""
LENGTHS = (5, 3)
"""Tokens of the two completions in a function's test."""
RATIOS = (0.4, 2.5)
"""Range of the ratios in a function's test."""
PROMPTS = prompt_rules.PromptCandidates(
    last_magnitude=np.array([0.87, np.nan, 0.0]),
    expected_square=np.array([3.0, 2.0, 0.5]),
    expected_tokens=np.array([80.0, 100.0, 120.0]),
    equal_visits=np.array([0, 0, 2]),
    explore=np.array([0.5, 0.5, 0.5]),
    floor=0.2,
)
"""Sample for a prompt rule: three prompts, including a prompt never seen."""
ADVANTAGE = np.array([[1.73, -0.58, -0.58, -0.58], [0.0, 0.0, 0.0, 0.0]])
COMPLETIONS = completion_rules.CompletionCandidates(
    advantage=ADVANTAGE,
    score=np.abs(ADVANTAGE),
    cost=np.array([[100.0, 120.0, 80.0, 90.0], [60.0, 70.0, 60.0, 90.0]]),
    floor=np.full(ADVANTAGE.shape, 0.2),
    zero_advantage=ADVANTAGE == 0.0,
)
"""Sample for a completion rule: a group of non-zero variance, and a group of equal rewards."""
EQUAL = replace(
    COMPLETIONS,
    advantage=np.zeros_like(ADVANTAGE),
    score=np.zeros_like(ADVANTAGE),
    zero_advantage=np.ones(ADVANTAGE.shape, bool),
)
"""Sample for a completion rule: equal rewards in all groups."""


def register_functions(config: Config) -> None:
    """Register the user's pruning rules and advantage estimator in this process.

    Raises:
        UserError: if a function cannot be imported, or returns a wrong result.
    """
    pruning = config.pruning
    own = config.loss.advantage
    if own is not None and own not in ESTIMATORS:
        advantages.register(own, wrap_function(load_function(advantages.SETTING, own)))
        advantages.check_estimator(own)
    if (own := pruning.prompts.function) is not None:
        prompt_rules.register(own, wrap_function(load_function(prompt_rules.FUNCTION, own)))
        prompt_rules.find_prompt_rule(own).inclusion(PROMPTS, pruning.prompts.keep)
    if (own := pruning.completions.function) is not None:
        completion_rules.register(own, wrap_function(load_function(completion_rules.FUNCTION, own)))
        rule = completion_rules.find_completion_rule(own)
        for candidates in (COMPLETIONS, EQUAL):
            rule.inclusion(candidates, cast("float", pruning.completions.share))


def load_engine_factory(config: Config) -> Callable[..., RolloutEngine[Any]] | None:
    """Return the factory ``rollout.engine_function``; ``None`` for built-in engines.

    Raises:
        UserError: if the factory cannot be imported, or called with the arguments of a run.
    """
    if (own := config.rollout.engine_function) is None:
        return None
    make = load_function(ENGINE, own)
    form = "(path, *, device, dtype, world)"
    try:
        inspect.signature(make).bind("path", device=None, dtype=None, world=None)
    except TypeError as error:
        raise UserError(
            ENGINE, own, f"cannot be called with {form} ({error})", f"Give it {form}"
        ) from error

    def make_engine(*arguments: Any, **named: Any) -> RolloutEngine[Any]:
        try:
            engine = make(*arguments, **named)
        except UserError:
            raise
        except FAILURES as error:
            raise UserError(
                ENGINE, own, f"raised:\n{traceback.format_exc(limit=-4)}", "Mend it"
            ) from error
        kind = type(engine)
        # A method inherited from the protocol counts as missing.
        missing = [
            name
            for name in METHODS
            if getattr(kind, name, None) in (None, getattr(RolloutEngine, name))
        ]
        if missing:
            problem = f"made a {kind.__name__}, which lacks {', '.join(missing)}"
            raise UserError(
                ENGINE,
                own,
                problem,
                "Derive it from RolloutEngine of megatron_dppo/rollout/engine.py",
            )
        return engine

    return make_engine


def load_objective(loss: LossConfig) -> Objective:
    """Return the objective of a run.

    Raises:
        UserError: if a user's function cannot be imported or called, or lacks a required property.
    """
    objective = resolve_objective(loss)
    if loss.objective is None:
        return objective
    function = wrap_function(load_function(SETTING, loss.objective))
    own = replace(objective, name=loss.objective, surrogate=partial(_compute_surrogate, function))
    # The bare function, because the wrapper would report errors as errors during a run.
    _try_out(own)
    return replace(own, surrogate=partial(_compute_named_surrogate, loss.objective, function))


def _compute_named_surrogate(
    name: str,
    function: Callable[[Tokens], Any],
    tokens: Tokens,
) -> tuple[Tensor, Tensor]:
    """Compute the surrogate during a run.

    Raises:
        UserError: if the function raises.
    """
    try:
        return _compute_surrogate(function, tokens)
    except FAILURES as error:
        problem = f"raised for {len(tokens.advantage)} tokens:\n{traceback.format_exc(limit=-4)}"
        raise UserError(SETTING, name, problem, "Mend it") from error


def _compute_surrogate(function: Callable[[Tokens], Any], tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the surrogate of a function, and the clipped tokens, if any."""
    returned = function(tokens)
    surrogate, clipped = (
        returned if isinstance(returned, tuple) else (returned, torch.zeros_like(tokens.advantage))
    )
    if not isinstance(surrogate, Tensor) or surrogate.shape != tokens.advantage.shape:
        shape = list(surrogate.shape) if isinstance(surrogate, Tensor) else type(surrogate).__name__
        raise ValueError(
            f"it returned {shape} for {len(tokens.advantage)} tokens, not a value for each"
        )
    return surrogate, clipped


def _try_out(objective: Objective) -> None:
    """Test the required properties of an objective.

    Raises:
        UserError: naming the missing property.
    """
    first = LENGTHS[0]
    sample = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
    advantage = torch.where(sample == 0, 1.5, -0.5)
    try:
        # Compare completions in a shared pack with completions in separate packs, then set the
        # first advantage to 0.
        whole = _compute_gradient(objective, sample, advantage)
        halves = slice(first), slice(first, None)
        apart = torch.cat(
            [_compute_gradient(objective, sample, advantage, half) for half in halves]
        )
        without = _compute_gradient(objective, sample, torch.where(sample == 0, 0.0, -0.5))
    except FAILURES as error:
        remedy = (
            "Correct it; its argument is Tokens of megatron_dppo.rl.losses, its result a tensor "
            "with a value for each token"
        )
        raise UserError(
            SETTING, objective.name, f"cannot be used ({type(error).__name__}: {error})", remedy
        ) from error
    if not torch.isfinite(whole).all():
        problem = (
            f"has a gradient that is not finite, for ratios between {RATIOS[0]:g} and {RATIOS[1]:g}"
        )
        raise UserError(SETTING, objective.name, problem, "Mend it")
    if not torch.allclose(whole, apart, rtol=1e-4, atol=1e-6):
        problem = (
            "gives a completion another loss where another one is in the same pack, and packs "
            "are random"
        )
        remedy = (
            "Compute means and sums over a completion, tokens.sequences.sums(…), not over all "
            "tokens"
        )
        raise UserError(SETTING, objective.name, problem, remedy)
    if without[:first].any():
        problem = (
            "has a gradient where the advantage is 0, and such completions are not trained on: "
            "it would be biased"
        )
        remedy = (
            "Multiply every term by tokens.advantage; for a KL term there is loss.kl_coef, for "
            "entropy loss.entropy.coef"
        )
        raise UserError(SETTING, objective.name, problem, remedy)


def _compute_gradient(
    objective: Objective,
    sample: Tensor,
    advantage: Tensor,
    part: slice = slice(None),
) -> Tensor:
    """Return the gradient of the loss by the log-probabilities, [R].

    The completions have different weights, as in a step. With equal weights, a mean over the pack
    would have the same gradient as its terms.
    """
    # Roll, so that both completions have high and low ratios.
    ratio = torch.linspace(*RATIOS, len(sample)).roll(3)
    old = torch.linspace(-3.0, -1.0, len(sample))
    logprobs = (old + ratio.log())[part].requires_grad_()
    losses, _ = compute_token_losses(
        objective,
        logprobs=logprobs,
        old_logprobs=old[part],
        engine_logprobs=old[part] - 0.01,
        reference_logprobs=None,
        advantage=advantage[part],
        kl_coef=0.0,
        tis_cap=None,
        sample=sample[part] - sample[part][0],
    )
    weights = 1.0 + 3.0 * sample[part]
    (gradient,) = torch.autograd.grad((weights * losses).sum(), logprobs)
    return gradient
