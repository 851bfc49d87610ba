"""``megatron-dppo eval``: the policy answers problems, and nothing is trained.

Every rank runs this program: it builds the policy as training does, but without gradients and
optimizer, gives its weights to the engine and asks, batch by batch. The leader writes each batch
down before the next one is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint, parse_step
from megatron_dppo.config import Config, replace
from megatron_dppo.data.date import with_date
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.evaluation.answers import (
    ANSWERS,
    SCORES,
    AnswerLog,
    AnswerRow,
    list_finished_benchmarks,
    read_finished,
    resolve_out_folder,
    write_questions,
    write_scores,
)
from megatron_dppo.evaluation.benchmarks import list_sources
from megatron_dppo.evaluation.evaluator import (
    EvalAnswers,
    EvalProblem,
    Evaluator,
    group_indices,
    load_problems,
    resolve_temperature,
    start_verifiers,
)
from megatron_dppo.evaluation.scores import compare, format_table, group_by_benchmark, score
from megatron_dppo.models.shape import read_shape
from megatron_dppo.observe.console import Console
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.observe.watchdog import Watchdog
from megatron_dppo.parallel.world import World, initialize, shutdown
from megatron_dppo.process.streams import report_progress
from megatron_dppo.rl.score import Score, collect_tracebacks
from megatron_dppo.rollout.scoring import check_failures
from megatron_dppo.trainer.agreement import MAX_TOKENS, check_agreement
from megatron_dppo.trainer.assemble import assemble_frozen


def evaluate_model(config: Config) -> None:
    """Answer what is left to be answered in ``eval.out``, then write and print the scores.

    Raises:
        UserError: on every rank, for what the user can mend.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with closing(Watchdog.from_config(config, world, PhaseTimers())):
        _evaluate(config, world)
    shutdown()


def _evaluate(config: Config, world: World) -> None:
    policy = config.model.folder
    folder = resolve_out_folder(config)
    config = replace(
        config, data=world.broadcast(lambda: with_date(config.data, policy, folder, keep=True))
    )
    tokenizer = world.run_on_all_ranks(lambda: load_tokenizer(policy))
    positions = world.run_on_all_ranks(lambda: read_shape(policy)).max_positions
    found = world.run_on_all_ranks(
        lambda: load_problems(config, tokenizer, max_positions=positions)
    )
    shown = {source.name: source.display_name for source in list_sources(config)}
    problems = [dataclasses.replace(problem, name=shown[problem.name]) for problem in found]
    size = config.eval.batch
    indices = group_indices(problem.name for problem in problems)
    batches = [
        [problems[i] for i in group[at : at + size]]
        for group in indices.values()
        for at in range(0, len(group), size)
    ]
    with ExitStack() as to_close:

        def open_log() -> AnswerLog | None:
            keys = [[(problem.name, problem.number) for problem in batch] for batch in batches]
            log = AnswerLog(folder, _collect_settings(config, problems), keys, config.eval.samples)
            return to_close.enter_context(closing(log))

        log = world.run_on_all_ranks(lambda: open_log() if world.is_rank0 else None)
        whole = world.broadcast(lambda: log.whole if log else [])
        left = [batch for batch, there in zip(batches, whole, strict=True) if not there]
        if left:
            _generate_answers(config, world, problems, left, log, to_close)
        world.broadcast(
            lambda: _report(config, folder, list(indices), log.read_rows() if log else ())
        )


def _generate_answers(
    config: Config,
    world: World,
    problems: Sequence[EvalProblem],
    pending: Sequence[Sequence[EvalProblem]],
    log: AnswerLog | None,
    to_close: ExitStack,
) -> None:
    workers = start_verifiers(config, world, problems, to_close, {})
    parts = assemble_frozen(config, world, temperature=config.rollout.temperature)
    engine = to_close.enter_context(closing(parts.build_engine()))
    parts.sync(engine, 0)
    short = config.pack.max_tokens - MAX_TOKENS
    if pool := [problem.prompt for problem in problems if len(problem.prompt.token_ids) <= short]:
        check_agreement(parts, engine, pool, version=0)
    evaluator = Evaluator(config, world, parts.build_collectors(engine, workers))
    done = len(problems) - sum(map(len, pending))
    console = Console(0)
    if done and world.is_rank0:
        console.print_note(f"{done} of {len(problems)} problems are answered already")
    failed: list[Score] = []
    scores: list[Score] = []
    of_all = config.eval.samples * len(problems)
    with report_progress(
        "problems", len(problems), initial=done, enabled=world.is_rank0
    ) as advance:
        for batch in pending:
            found = evaluator.generate_answers(batch, keep=len(batch), total=of_all)
            failed += found.failed
            check_failures(config.reward, failed, of_all)
            if log:
                log.append(
                    [row for i in range(len(batch)) for row in _build_rows(batch[i], found, i)]
                )
                for note in collect_tracebacks(found.failed):
                    console.print_note(note)
                scores += [
                    answer.score for group in found.answers for answer in group if answer.score
                ]
            right = sum(score.correct for score in scores)
            advance(len(batch), f"{right / len(scores):.1%} right" if scores else "")


def _build_rows(problem: EvalProblem, answers: EvalAnswers, index: int) -> list[AnswerRow]:
    """Lines of ``answers.jsonl`` for one problem, one for each answer."""
    return [
        {
            "benchmark": problem.name,
            "problem": problem.number,
            "sample": sample,
            "prompt": problem.prompt.text,
            "label": problem.prompt.label_text,
            "answer": answer.text,
            "extracted": answer.extracted,
            "correct": answer.score.correct if answer.score else None,
            "by": list(answer.score.by) if answer.score else [],
            "reward": answer.score.reward if answer.score else None,
            "metrics": dict(answer.score.metrics) if answer.score else {},
            "tokens": answer.tokens,
            "finish": answer.finish_reason,
            "majority": None if math.isnan(answers.votes[index]) else float(answers.votes[index]),
        }
        for sample, answer in enumerate(answers.answers[index])
    ]


def _report(
    config: Config, folder: Path, benchmarks: Sequence[str], rows: Sequence[AnswerRow]
) -> None:
    checkpoint = config.model.checkpoint
    samples = config.eval.samples
    finished = {
        *benchmarks,
        *list_finished_benchmarks(folder),
    }  # of others a kill may have left a part
    rows = [row for row in rows if row["benchmark"] in finished]
    found = {name: score(problems) for name, problems in group_by_benchmark(rows).items()}
    scores = {
        "model": checkpoint or config.model.path,
        "step": None if checkpoint is None else parse_step(find_checkpoint(Path(checkpoint))),
        "engine": config.rollout.engine,
        "samples": samples,
        "temperature": resolve_temperature(config),
        "top_p": config.eval.top_p,
        "top_k": config.eval.top_k,
        "max_response_tokens": config.max_answer_tokens,
        "benchmarks": found,
    }
    write_scores(folder, scores)
    console = Console(0)
    places = {
        "scores": folder / SCORES,
        "answers": folder / ANSWERS,
        "to read": write_questions(folder),
    }
    console.print_banner(
        [
            *format_table(found, samples),
            "",
            *(f"{kind:<7}  {place}" for kind, place in places.items()),
        ]
    )
    if config.eval.against:
        others = read_finished(Path(config.eval.against), "eval.against")
        console.print_banner(compare(rows, others, baseline_name=config.eval.against))


def _collect_settings(config: Config, problems: Sequence[EvalProblem]) -> dict[str, Any]:
    """All that the answers depend on where the engine can be seeded, except the number of ranks."""
    indices = group_indices(problem.name for problem in problems)
    return {
        "model": str(Path(config.model.checkpoint or config.model.folder).resolve()),
        "weights": _compute_weight_fingerprint(config),
        "model.dtype": config.model.dtype,
        "rollout.engine": config.rollout.engine,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.stop_token_ids": config.rollout.stop_token_ids,
        "run.seed": config.run.seed,
        "eval.samples": config.eval.samples,
        "eval.temperature": resolve_temperature(config),
        **{
            f"eval.{name}": getattr(config.eval, name)
            for name in ("top_p", "top_k", "max_response_tokens")
        },
        "eval.batch": config.eval.batch,
        "problems": {
            name: _compute_fingerprint([problems[i] for i in positions])
            for name, positions in indices.items()
        },
    }


def _compute_weight_fingerprint(config: Config) -> str:
    """A fingerprint of the files that the weights are read from. It changes once they have been
    written again."""
    checkpoint = config.model.checkpoint
    folder = config.model.folder if checkpoint is None else find_checkpoint(Path(checkpoint))
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _compute_fingerprint(problems: Sequence[EvalProblem]) -> str:
    references = [
        (problem.prompt.text, problem.prompt.label_text, problem.verifier) for problem in problems
    ]
    return f"{len(problems)} problems, {hashlib.sha256(repr(references).encode()).hexdigest()[:16]}"
