"""``megatron-dppo eval``: the policy answers problems, without training.

Every rank builds the policy without gradients and optimizer, syncs the weights to the engine, and
requests answers in batches. Rank 0 writes each batch before the next request.
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
from megatron_dppo.evaluation.scores import (
    compare,
    describe_correctness,
    format_table,
    group_by_benchmark,
    score,
)
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
    """Answer the remaining problems of ``eval.out``, then write and print the scores.

    Raises:
        UserError: on every rank, if the user can mend the cause.
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
    batches = []
    for group in indices.values():
        in_file = [problems[i] for i in group]
        # A batch has a single benchmark, so that benchmarks can be added later.
        batches += [in_file[at : at + size] for at in range(0, len(group), size)]
    with ExitStack() as to_close:

        def open_log() -> AnswerLog | None:
            keys = []
            for batch in batches:
                keys.append([(problem.name, problem.number) for problem in batch])
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
    # Compare on prompts that leave room for a short answer in a pack.
    if pool := [problem.prompt for problem in problems if len(problem.prompt.token_ids) <= short]:
        check_agreement(parts, engine, pool, version=0)
    evaluator = Evaluator(config, world, parts.build_collectors(engine, workers))
    done = len(problems) - sum(map(len, pending))
    # Steps do not apply, so the console has no total.
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
            # Stop early, because a failing verifier would waste the whole evaluation.
            check_failures(config.reward, failed, of_all)
            if log:
                rows = []
                for index, problem in enumerate(batch):
                    rows += _build_rows(problem, found, index)
                log.append(rows)
                for note in collect_tracebacks(found.failed):
                    console.print_note(note)
                scores += [
                    answer.score for group in found.answers for answer in group if answer.score
                ]
            right = sum(score.correct for score in scores)
            advance(len(batch), f"{right / len(scores):.1%} right" if scores else "")
    for note in describe_correctness(scores):
        console.print_note(note)


def _build_rows(problem: EvalProblem, answers: EvalAnswers, index: int) -> list[AnswerRow]:
    vote = answers.votes[index]
    rows: list[AnswerRow] = []
    for sample, answer in enumerate(answers.answers[index]):
        row = {
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
            "majority": None if math.isnan(vote) else float(vote),
        }
        rows.append(row)
    return rows


def _report(
    config: Config,
    folder: Path,
    benchmarks: Sequence[str],
    rows: Sequence[AnswerRow],
) -> None:
    checkpoint = config.model.checkpoint
    samples = config.eval.samples
    # Leave out further benchmarks: a kill may have left partial answers.
    finished = {*benchmarks, *list_finished_benchmarks(folder)}
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
    if config.eval.baseline:
        others = read_finished(Path(config.eval.baseline), "eval.baseline")
        console.print_banner(compare(rows, others, baseline_name=config.eval.baseline))


def _collect_settings(config: Config, problems: Sequence[EvalProblem]) -> dict[str, Any]:
    """Return the settings and files that seeded answers depend on."""
    indices = group_indices(problem.name for problem in problems)
    fingerprints = {}
    for name, of in indices.items():
        fingerprints[name] = _compute_fingerprint([problems[i] for i in of])
    # The number of ranks is absent, because answers do not depend on ranks.
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
        "problems": fingerprints,
    }


def _compute_weight_fingerprint(config: Config) -> str:
    """Return a fingerprint of the weight files."""
    checkpoint = config.model.checkpoint
    folder = config.model.folder if checkpoint is None else find_checkpoint(Path(checkpoint))
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".distcp"))
    # Times instead of contents, because reading all weights takes minutes.
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _compute_fingerprint(problems: Sequence[EvalProblem]) -> str:
    references = [
        (problem.prompt.text, problem.prompt.label_text, problem.verifier) for problem in problems
    ]
    return f"{len(problems)} problems, {hashlib.sha256(repr(references).encode()).hexdigest()[:16]}"
