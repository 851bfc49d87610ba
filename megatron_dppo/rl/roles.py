"""Credit by role: a conversation in which the policy speaks in several roles, each with a reward of its own.

Token t, which role ρ has sampled in conversation i of a prompt, has the advantage

    A_ρi = r_ρi − mean of r_ρj over the conversations j of the prompt in which ρ speaks

(divided, whitened or held against the minibatch, as the objective says). So the group of a role is its own part of the
prompt's conversations, and its size the number of conversations in which it speaks: r_ρ of another one is of no token.
That number does not depend on what conversation i says, where it is one in which ρ speaks, so that the mean of the
others is a baseline: with ``rloo`` the expected gradient is

    Σ_ρ E[r_ρ Σ_{t of ρ} ∇log π(y_t | y_<t)]

Each term is the gradient of a role's expected reward by what that role says, the other roles being a part of its
environment. They are the same policy and change with it, so that the sum is in general the gradient of no objective: no
role is credited for what another one makes of its words. Roles that all have the same reward are the exception.
"""

from __future__ import annotations

import numpy as np

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.rl.group_sizes import minibatch_advantages
from megatron_dppo.rl.objectives import Objective, whole_advantage
from megatron_dppo.rl.types import Floats, Roles, StepMetadata


def role_advantages(part: StepMetadata, rollout: RolloutConfig, objective: Objective) -> Floats:
    """[Q, G, R], the advantage of each role's tokens; 0 where it does not speak, and where its rewards are equal.

    Two conversations of a solver and a critic, with the rewards 1 and 0 of the one and 0 and 2 of the other, have
    [[[1, −1], [−1, 1]]] under GRPO.
    """
    result = np.zeros(part.roles.shape)
    for role in range(part.roles.shape[2]):
        known = part.roles[..., role]
        speaks = known["tokens"] > 0
        rows = np.flatnonzero(speaks.any(axis=1))
        speakers_first = np.argsort(~speaks[rows], axis=1, kind="stable")
        rewards = np.take_along_axis(known["reward"][rows], speakers_first, axis=1)
        samples, inclusion = speaks[rows].sum(axis=1), part.prompt_inclusion[rows]
        of_role = np.zeros_like(rewards)
        found = minibatch_advantages(rewards, samples, inclusion, rollout, objective)
        np.put_along_axis(of_role, speakers_first, found, axis=1)
        result[rows, :, role] = of_role
    return result


def conversation_advantages(advantages: Floats, roles: Roles) -> Floats:
    """[Q, G], the ``whole_advantage`` of a conversation, whose parts are what each role says of it. [Q, G, R] both.

    A role counts by its tokens as well, so little that it matters only where all norms are 0.
    """
    return whole_advantage(advantages, roles["norm"] ** 2 + 1e-12 * roles["tokens"])
