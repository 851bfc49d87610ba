"""A user's function generates, by a real server: what the policy was given is read and not trained on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import Config, ModelConfig, RolloutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import Sample
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.conversation_checks import UnusableError
from megatron_dppo.rollout.conversation_functions import _sampling_params, completion_of_samples, conversation_of
from megatron_dppo.rollout.engine import Sampling
from tests.servers.real import Kind, RealServers
from tests.servers.test_training import AGREES, Start, ended, finish, given, start  # noqa: F401
from tests.small_runs import rows

FILE = Path(__file__).parent / "calculator.py"
TOOL, FIRST_TURN = "=7\n", 6
COMPLETIONS = 16 * 4
"""Of a step."""


@pytest.mark.servers
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("sglang", "custom_generate={}:generate"),
        ("sglang", "conversation={}:rollout_in_roles"),
        ("vllm", "conversation={}:rollout"),
    ],
)
def test_conversations_with_a_tool_are_trained_on_as_the_server_scored_them(
    kind: Kind,
    setting: str,
    start: Start,  # noqa: F811
    real_servers: RealServers,
    served_policy: Path,
    tmp_path: Path,
) -> None:
    run, server = tmp_path / "run", real_servers.get(kind, 1)
    settings = [f"rollout.{setting.format(FILE)}", "pruning.prompts.rule=none", "run.steps=2", "eval.show=4"]
    if in_roles := setting.endswith("in_roles"):
        settings += ["rollout.roles=[asker,answerer]", f"reward.function={FILE}:reward_of_roles"]
    where = [f"rollout.engine={kind}", f"rollout.servers=[{server.api.url}]"]
    process = start(run, served_policy, *where, *settings, secret=server.secret)
    first, *steps = finish(process, run)
    assert first["eval/accuracy"] <= 1.0
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["train/rollout_logprob_abs_diff"] <= AGREES
        assert step["train/token_mult_prob_error"] <= 1 + AGREES
        assert (step["rollout/stale_tokens"], step["staleness/mean"]) == (0.0, 0.0)
        of_roles = [step.get(f"rollout/role_reward/{role}") for role in ("asker", "answerer")]
        if in_roles:
            assert of_roles[0] == pytest.approx(step["rollout/reward"]) and of_roles[1] < 0.0
        else:
            assert of_roles == [None, None]
        told = step["rollout/response_len/mean"] * COMPLETIONS - step["rollout/generated_tokens"]
        assert told == pytest.approx(len(TOOL) * COMPLETIONS), "a second turn follows every first one"
    answers = (run / "answers.jsonl").read_text()
    assert re.search(rf'"answer": ".{{0,{FIRST_TURN}}}=7', answers), "the reward and the log see the tool's words"


GAME = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="more" if len(messages[-1]["content"]) % 2 else "less")]

async def odd(completion):
    return float(sum(len(message["content"]) for message in completion) % 3)

def load_environment():
    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(64)]
    return Guess(max_turns=2, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[odd]))
"""


@pytest.mark.servers
@pytest.mark.parametrize(("kind", "conversation"), [("sglang", "verifiers"), ("vllm", f"{FILE}:rollout_in_sequences")])
def test_conversations_of_environments_and_of_several_sequences_are_trained_on_also_after_a_resume(
    kind: Kind,
    conversation: str,
    start: Start,  # noqa: F811
    real_servers: RealServers,
    served_policy: Path,
    tmp_path: Path,
) -> None:
    run, server = tmp_path / "run", real_servers.get(kind, 1)
    settings = [f"rollout.engine={kind}", f"rollout.servers=[{server.api.url}]", f"rollout.conversation={conversation}"]
    settings += ["pruning.prompts.rule=none", "run.checkpoint_every=1", "eval.problems=0", "rollout.prompts_per_step=8"]
    if of_environment := conversation == "verifiers":
        pytest.importorskip("verifiers")
        run.mkdir()
        (run / "guess_game.py").write_text(GAME)
        settings += ["data.train=verifiers", "data.verifiers.environment=guess_game", "data.verifiers.eval_problems=8"]
        settings += [
            "reward.function=verifiers",
            "rollout.max_response_tokens=64",
            "data.max_prompt_tokens=64",
            "data.chat_template=true",
        ]
    for steps in (1, 2):
        finish(start(run, served_policy, *settings, f"run.steps={steps}", secret=server.secret), run)
    steps = rows(run)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["train/rollout_logprob_abs_diff"] <= AGREES
        told = step["rollout/response_len/mean"] * 8 * 4 - step["rollout/generated_tokens"]
        assert told > 8 * 4 * (1 if of_environment else len(TOOL)), "other words came between"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (f"{FILE}:generate_at_once", "is no coroutine"),
        (f"{FILE}:generate_group", "cannot be called with 3 arguments"),
        (f"{FILE}:generat", "Perhaps 'generate' was meant"),
        ("no_such_module:generate", "No module named 'no_such_module'"),
    ],
)
def test_a_function_of_another_form_is_refused(spec: str, words: str, tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path)), rollout=RolloutConfig(custom_generate=spec))
    with pytest.raises(UserError) as raised:
        conversation_of(config)
    assert raised.value.setting == "rollout.custom_generate" and words in str(raised.value)


def test_samples_of_a_prompt_have_seeds_of_their_own() -> None:
    """Where SGLang's inference is deterministic, conversations without one would all be the same."""
    sampling = Sampling(4, 8, 1.0, (), seed=3)
    seeds = {_sampling_params(sampling, prompt, i)["sampling_seed"] for prompt in (0, 1) for i in range(4)}
    assert len(seeds) == 8 and all(0 <= seed < 2**31 for seed in seeds)
    assert _sampling_params(sampling, 0, 0) == _sampling_params(sampling, 0, 0)


def test_several_samples_are_the_sequences_of_one_completion() -> None:
    def sample(tokens: list[int], length: int) -> Sample:
        logprobs = [-0.1 * token for token in tokens[-length:]]
        return Sample(tokens=tokens, response_length=length, rollout_log_probs=logprobs, status=Sample.Status.COMPLETED)

    prompt = Prompt(0, np.array([7, 8], np.int32), "", "")
    both = [sample([7, 8, 1, 2], 2), sample([5, 5, 5, 3], 1)]
    whole = completion_of_samples(both, prompt, limit=2)
    assert (whole.token_ids.tolist(), whole.starts, whole.finish_reason) == ([1, 2, 5, 5, 5, 3], (2,), "stop")
    assert whole.loss_mask.tolist() == [True, True, False, False, False, True]
    np.testing.assert_allclose(whole.logprobs[whole.loss_mask], [-0.1, -0.2, -0.3], rtol=1e-6)
    cut = completion_of_samples([*both, sample([5, 5, 5, 3, 3], 2)], prompt, limit=2)
    assert (cut.starts, cut.finish_reason) == ((2, 6), "length"), "a sequence was cut off"
    whole = completion_of_samples([*both, sample([5] * 9, 1)], prompt, limit=2)
    ended = whole.token_ids.tolist(), whole.finish_reason
    assert ended == ([1, 2, 5, 5, 5, 3], "length"), "a context that left no room is cut off whole"
    for wrong, words in (([both[1], both[0]], "begin with the prompt"), ([both[0], 3], "a int"), ([], "an empty list")):
        with pytest.raises(UnusableError, match=words):
            completion_of_samples(wrong, prompt, limit=2)
    masked = sample([7, 8, 1, 2], 2)
    masked.loss_mask = [1, 0.5]  # type: ignore[list-item]
    with pytest.raises(UnusableError, match="a loss_mask of other values than true and false"):
        completion_of_samples(masked, prompt, limit=2)
    with pytest.raises(UnusableError, match="1 tokens for a prompt of 0 and a response of 1"):
        completion_of_samples([both[0], sample([3], 1)], prompt, limit=2)
