"""Held-out accuracy is of what was scored; each problem is answered as often as asked; a resume leaves no twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dppo.config import Config, EvalConfig, replace
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import EvalProblem, Evaluator, HeldOutScores, ShownAnswer, evaluate
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Prompt
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, load_pools
from megatron_dppo.trainer.run_logger import read_answers, record_answers
from tests.rollout.scripted import (
    FAILING,
    LIMIT_S,
    LIMIT_TOKENS,
    Said,
    ScriptedEngine,
    ScriptedWorkers,
    as_ranks,
    collect_config,
    pool_of,
    world_of,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(character_tokenizer(), folder, max_tokens=512)
    return load_tokenizer(folder)


def problems_of(files: Mapping[str, Sequence[Prompt]]) -> list[EvalProblem]:
    return [
        EvalProblem(name, i, prompt, FAILING) for name, prompts in files.items() for i, prompt in enumerate(prompts)
    ]


def evaluator_of(
    tokenizer: Tokenizer,
    answers: Sequence[str | Said | Sequence[Said]],
    world: World,
    config: Config,
    workers: RewardWorkers | None = None,
) -> tuple[Evaluator, ScriptedEngine]:
    """An evaluator of prompts that are answered so, in their order, and the engine that answers them."""
    script = {i: [Said(said)] if isinstance(said, str) else said for i, said in enumerate(answers)}
    engine = ScriptedEngine(tokenizer, script)
    parts = PolicyParts(config, world, None, None, tokenizer, 0, (end_token_id(tokenizer),))
    return Evaluator(config, world, parts.collectors(engine, {FAILING: workers or ScriptedWorkers()})), engine


def evaluated(
    tokenizer: Tokenizer,
    answers: Sequence[str | Sequence[Said]],
    *,
    show: int = 0,
    samples: int = 1,
    max_failures: float = 1.0,
    workers: RewardWorkers | None = None,
) -> tuple[HeldOutScores, ScriptedEngine]:
    """The evaluation of prompts that are answered so, in their order, and the engine that answered them."""
    config = replace(collect_config(max_failures=max_failures), eval=EvalConfig(samples=samples, show=show))
    evaluator, engine = evaluator_of(tokenizer, answers, world_of(1, 0), config, workers)
    return evaluate(evaluator, problems_of({"": pool_of(len(answers))}), config.eval), engine


def test_accuracy_and_reward_are_of_the_scored_ones_only(tokenizer: Tokenizer) -> None:
    result, _ = evaluated(tokenizer, ["score 1", "raise it", "score 0", "score 2", "raise it  ", "score 1e-1"])
    assert result.metrics == {
        "eval/accuracy": 2 / 4,
        "eval/reward": pytest.approx(3.1 / 4),
        "eval/unscored": 2.0,
        "eval/response_len/mean": pytest.approx((8 + 9 + 8 + 8 + 11 + 11) / 6),
    }


def test_each_data_source_has_its_accuracy_where_there_are_several(tokenizer: Tokenizer) -> None:
    def found(*sources: str) -> dict[str, float]:
        answers = ["score 1", "raise it", "score 0", "score 2", "score 0", "raise it too"]
        evaluator, _ = evaluator_of(tokenizer, answers, world_of(1, 0), collect_config(max_failures=1.0))
        pool = [dataclasses.replace(p, data_source=of) for p, of in zip(pool_of(len(answers)), sources, strict=True)]
        metrics = evaluate(evaluator, problems_of({"a": pool[:3], "b": pool[3:]}), EvalConfig()).metrics
        return {name: value for name, value in metrics.items() if name.startswith("eval/source/")}

    assert found("x", "x", "y/z", "x", "x", "w") == {"eval/source/x": 2 / 3, "eval/source/y/z": 0.0}
    assert found(*["x"] * 6) == {} == found(*["x", "", "x", "", "x", "x"])


def test_nothing_scored_has_no_accuracy(tokenizer: Tokenizer) -> None:
    result, _ = evaluated(tokenizer, ["raise it"] * 3)
    assert result.metrics == {"eval/unscored": 3.0, "eval/response_len/mean": 9.0}


def test_all_wrong_is_an_accuracy_of_zero(tokenizer: Tokenizer) -> None:
    result, _ = evaluated(tokenizer, ["score 0"] * 3)
    assert (result.metrics["eval/accuracy"], result.metrics["eval/unscored"]) == (0.0, 0.0)


def test_tracebacks_come_through_as_notes_each_once(tokenizer: Tokenizer) -> None:
    workers = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
    result, _ = evaluated(tokenizer, ["raise it", "score 1", "raise it", "none"], workers=workers)
    workers.close()
    assert len(result.notes) == 2
    assert "Traceback" in result.notes[0] and "ValueError: it" in result.notes[0]
    assert result.metrics["eval/accuracy"] == 1.0


def test_too_many_failures_stop_an_evaluation_as_they_stop_a_step(tokenizer: Tokenizer) -> None:
    answers = ["score 1", "raise first", "raise then", "score 0"]
    assert evaluated(tokenizer, answers, max_failures=0.5)[0].metrics["eval/unscored"] == 2.0
    with pytest.raises(UserError, match="2 of 4 completions") as caught:
        evaluated(tokenizer, answers, max_failures=0.45)
    assert caught.value.setting == "reward.function"
    assert "raise first" in caught.value.problem


def test_every_prompt_is_answered_once_and_greedily(tokenizer: Tokenizer) -> None:
    _, engine = evaluated(tokenizer, ["score 1"] * 5)
    ((asked, sampling),) = engine.asked
    assert asked == [0, 1, 2, 3, 4]
    assert (sampling.temperature, sampling.samples, sampling.max_tokens) == (0.0, 1, LIMIT_TOKENS)


def test_an_evaluation_has_limits_and_a_sampling_of_its_own(tokenizer: Tokenizer) -> None:
    given = EvalConfig(samples=2, temperature=0.6, top_p=0.9, top_k=20, max_response_tokens=LIMIT_TOKENS + 7)
    config = replace(collect_config(), eval=given)
    evaluator, engine = evaluator_of(tokenizer, [[Said("score 1"), Said("score 0")]], world_of(1, 0), config)
    evaluate(evaluator, problems_of({"": pool_of(1)}), config.eval)
    ((_, sampling),) = engine.asked
    asked = sampling.samples, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens
    assert asked == (2, 0.6, 0.9, 20, LIMIT_TOKENS + 7)


def test_shown_are_the_first_answers_with_their_verdicts(tokenizer: Tokenizer) -> None:
    result, _ = evaluated(tokenizer, ["score 1", "raise it", "score 0", "score 1"], show=3)
    assert result.shown == (
        ShownAnswer("prompt 0", "score 1", "1", True),
        ShownAnswer("prompt 1", "raise it", "1", False),
        ShownAnswer("prompt 2", "score 0", "1", False),
    )


def test_ranks_share_the_prompts_and_agree(tokenizer: Tokenizer) -> None:
    answers = ["score 1", "score 0", "raise odd", "raise even", "score 1"]

    def on_a_rank(world: World) -> tuple[HeldOutScores, list[int]]:
        evaluator, engine = evaluator_of(tokenizer, answers, world, collect_config())
        result = evaluate(evaluator, problems_of({"": pool_of(5)}), EvalConfig(show=3))
        return result, [prompt for prompts, _ in engine.asked for prompt in prompts]

    ((alone, _),) = as_ranks(1, on_a_rank)
    (one, here), (other, there) = as_ranks(2, on_a_rank)
    assert here and there and sorted(here + there) == [0, 1, 2, 3, 4]
    assert one == other
    assert one.metrics == pytest.approx(alone.metrics)
    assert one.metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert one.shown == alone.shown, "the first prompts of all, in their order"
    assert set(one.notes) == set(alone.notes) == {"raise odd", "raise even"}


def test_failures_may_all_be_one_ranks(tokenizer: Tokenizer) -> None:
    """A quarter of eight may fail; both that do are among the four of rank 0, which scores the rest all the same."""
    answers = ["raise it" if i in (0, 2) else "score 1" for i in range(8)]

    def on_a_rank(world: World) -> HeldOutScores:
        evaluator, _ = evaluator_of(tokenizer, answers, world, collect_config(max_failures=0.25))
        return evaluate(evaluator, problems_of({"": pool_of(8)}), EvalConfig())

    for result in as_ranks(2, on_a_rank):
        assert result.metrics["eval/unscored"] == 2.0


def test_failures_are_held_against_a_whole_evaluation_and_not_against_one_batch_of_it(tokenizer: Tokenizer) -> None:
    answers = ["raise one", "score 1", "score 1", "score 0", "score 1", "raise two"]
    evaluator, _ = evaluator_of(tokenizer, answers, world_of(1, 0), collect_config(max_failures=0.2))
    problems = problems_of({"": pool_of(6)})
    first, second, third = (evaluator.answer(problems[i : i + 2], keep=0, of_all=6).failures for i in (0, 2, 4))
    evaluator.check_failures([first, second], 6)
    with pytest.raises(UserError, match="2 of 6 completions"):
        evaluator.check_failures([first, second, third], 6)


def test_files_have_accuracies_of_their_own_and_count_alike_in_the_mean(tokenizer: Tokenizer) -> None:
    """Five problems in three files, over two ranks; of the last file none can be scored."""
    answers = ["score 1", "score 0", "score 1", "raise it", "score 1"]
    prompts = pool_of(5)
    files = {"aime24": prompts[:3], "lost": prompts[3:4], "amc23": prompts[4:]}

    def on_a_rank(world: World) -> HeldOutScores:
        evaluator, _ = evaluator_of(tokenizer, answers, world, collect_config())
        return evaluate(evaluator, problems_of(files), EvalConfig())

    for ranks in (1, 2):
        for result in as_ranks(ranks, on_a_rank):
            assert result.metrics == {
                "eval/aime24": pytest.approx(2 / 3),
                "eval/aime24/truncated_ratio": 0.0,
                "eval/lost/truncated_ratio": 0.0,
                "eval/amc23": 1.0,
                "eval/amc23/truncated_ratio": 0.0,
                "eval/accuracy": pytest.approx((2 / 3 + 1) / 2),
                "eval/reward": pytest.approx(3 / 4),
                "eval/unscored": 1.0,
                "eval/response_len/mean": pytest.approx((4 * 8 + 9) / 5),
            }


def test_several_answers_give_the_chance_that_one_of_k_is_right_and_what_a_vote_says(tokenizer: Tokenizer) -> None:
    right, wrong, other, lost = Said("score 1"), Said("score 0"), Said("score 5e-1", ended=False), Said("raise it")
    result, engine = evaluated(
        tokenizer, [[right, right, wrong, wrong], [wrong, wrong, wrong, right], [right, wrong, other, lost]], samples=4
    )
    ((_, sampling),) = engine.asked
    assert (sampling.samples, sampling.temperature) == (4, 0.7), "the rollouts' temperature, where none is given"
    assert result.metrics == {
        "eval/accuracy": pytest.approx((1 / 2 + 1 / 4 + 1 / 3) / 3),
        "eval/accuracy-pass@2": pytest.approx((5 / 6 + 1 / 2 + 2 / 3) / 3),
        "eval/accuracy-pass@4": 1.0,
        "eval/accuracy-maj@4": pytest.approx((1 / 2 + 0 + 1 / 3) / 3),
        "eval/reward": pytest.approx(4.5 / 11),
        "eval/unscored": 1.0,
        "eval/response_len/mean": pytest.approx((10 * 8 + 10 + 9) / 12),
    }


def test_named_files_are_held_out_by_their_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of each file as many problems as ``eval.problems``, and of one file alone, without a name."""
    for name, rows in (("one", 3), ("two", 1)):
        lines = (f'{{"prompt": "{i}+1=", "label": "{i + 1}"}}\n' for i in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"

    def pools(*overrides: str) -> dict[str, list[str]]:
        words = (f"data.train={one}", "data.chat_template=false", "eval.problems=2", *overrides)
        shape = SimpleNamespace(max_positions=2048)
        parts = PolicyParts(load_config(None, words), world_of(1, 0), shape, None, tokenizer, 0, ())
        found: dict[str, list[str]] = {}
        for problem in load_pools(parts)[1]:
            found.setdefault(problem.name, []).append(problem.prompt.text)
        return found

    assert pools(f"data.eval={{b: {two}, a: {one}}}") == {"b": ["0+1="], "a": ["0+1=", "1+1="]}
    assert pools(f"data.eval={one}") == {"": ["0+1=", "1+1="]}
    assert pools(f"data.eval={one}", f"eval.benchmarks=[b={two}]") == {"": ["0+1=", "1+1="], "b": ["0+1="]}
    assert len(pools(f"data.eval={one}", "eval.problems=null")[""]) == 3
    assert pools() == {} == pools(f"data.eval={one}", "eval.problems=0")


def test_held_out_problems_in_the_training_data_are_printed_once_by_rank_0(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out, other = (tmp_path / f"{name}.jsonl" for name in ("train", "held_out", "other"))
    train.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
    held_out.write_text('{"prompt": "3+3=", "label": "6"}\n{"prompt": " 2+2=", "label": "4"}\n')
    other.write_text('{"prompt": "3+3=", "label": "6"}\n')

    def printed(file: Path, rank: int) -> str:
        words = (f"data.train={train}", f"data.eval={file}", "data.chat_template=false")
        shape = SimpleNamespace(max_positions=2048)
        load_pools(PolicyParts(load_config(None, words), world_of(1, rank), shape, None, tokenizer, 0, ()))
        return capsys.readouterr().out

    of = f"1 of 2 held-out problems stand in the training data as well: {held_out}, line 2 is {train}, line 2"
    assert printed(held_out, 0) == f"note  {of}; their accuracy says nothing of problems that were never seen\n"
    assert printed(held_out, 1) == "" == printed(other, 0)


def answered(text: str) -> HeldOutScores:
    return HeldOutScores({}, (ShownAnswer("1+1=", text, "2", text == "2"),), ())


def test_recorded_answers_replace_those_of_the_same_or_a_later_step(tmp_path: Path) -> None:
    assert read_answers(tmp_path) == []
    for step in (0, 10, 20, 30):
        record_answers(tmp_path, step, answered(f"at {step}"))
    record_answers(tmp_path, 20, answered("2"))
    rows = read_answers(tmp_path)
    assert [(row["step"], row["answers"][0]["answer"]) for row in rows] == [(0, "at 0"), (10, "at 10"), (20, "2")]
    assert rows[-1]["answers"] == [{"prompt": "1+1=", "answer": "2", "label": "2", "correct": True}]
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]
