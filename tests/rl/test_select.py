import numpy as np
import pytest

from megatron_dppo.config import PromptPruningConfig
from megatron_dppo.rl.advantages import advantages
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.seeds import Purpose, generator
from megatron_dppo.rl.select import select
from megatron_dppo.rl.types import Selection


def seen_history(prompts: int, seed: int = 0) -> PromptHistory:
    rng = np.random.default_rng(seed)
    rewards = (rng.random((prompts, 8)) < rng.random((prompts, 1))).astype(float)
    history = PromptHistory(0.9)
    history.update(np.arange(prompts), rewards, advantages(rewards, normalise=True))
    return history


def draw(rule: str, history: PromptHistory, step: int, keep: float = 0.7) -> tuple[np.ndarray, Selection]:
    window = np.random.default_rng(step).permutation(200)[:64]
    selection = select(
        window,
        history,
        PromptPruningConfig(rule=rule),
        group_size=8,
        normalised=True,
        keep=keep,
        rng=generator(1, step, Purpose.PROMPTS),
    )
    return window, selection


@pytest.mark.parametrize("history", [PromptHistory(0.9), seen_history(100), seen_history(200)])
def test_neyman_rolls_out_the_same_number_of_prompts_at_every_step(history: PromptHistory):
    assert {len(draw("neyman", history, step)[1].prompt_ids) for step in range(20)} == {round(0.7 * 64)}


@pytest.mark.parametrize("rule", ["none", "threshold", "neyman"])
def test_prompts_stay_in_the_order_of_the_window_each_with_its_probability(rule: str):
    window, selection = draw(rule, seen_history(200), step=3)
    place = {prompt: k for k, prompt in enumerate(window.tolist())}
    assert np.all(np.diff([place[prompt] for prompt in selection.prompt_ids.tolist()]) > 0)
    assert selection.window == 64
    assert len(selection.inclusion) == len(selection.prompt_ids)
    assert ((selection.inclusion >= 0.2) & (selection.inclusion <= 1.0)).all()


def test_what_a_biased_rule_keeps_stands_for_itself_alone():
    rewards = np.ones((200, 8))
    history = PromptHistory(0.9)
    for _ in range(3):
        history.update(np.arange(200), rewards, advantages(rewards, normalise=True))
    _, selection = draw("greso", history, step=0)
    assert 0 < len(selection.prompt_ids) < 40, "prompts that are always right are skipped"
    np.testing.assert_array_equal(selection.inclusion, 1.0)


def test_no_rule_keeps_the_whole_window():
    window, selection = draw("none", seen_history(200), step=3)
    np.testing.assert_array_equal(selection.prompt_ids, window)
    np.testing.assert_array_equal(selection.inclusion, 1.0)


def test_the_same_seed_and_step_select_the_same_prompts_and_another_step_others():
    history = seen_history(200)
    one, again = draw("neyman", history, 5)[1], draw("neyman", history, 5)[1]
    np.testing.assert_array_equal(one.prompt_ids, again.prompt_ids)
    assert generator(1, 5, Purpose.PROMPTS).random() != generator(1, 6, Purpose.PROMPTS).random()
    assert generator(1, 5, Purpose.PROMPTS).random() != generator(1, 5, Purpose.COMPLETIONS).random()
