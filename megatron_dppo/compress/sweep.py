"""``megatron-dppo compress sweep``: smaller policies of several sizes and methods, and what each of them is worth.

Everything lies under one folder, and what is there is not done again::

    OUT/sweep.json                     what was asked, and a row for each smaller policy
    OUT/whole/eval                     the answers of the whole policy
    OUT/width-activation-0.75/policy   a smaller one
                             /eval     its answers before recovery
                             /sft-100  it again, after so many steps of ``sft``, with a run and answers beside it
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.convert_commands import naming
from megatron_dppo.bridge.safetensors_files import stored_tensors
from megatron_dppo.compress.calibration import digest_of_answers, draw, forget, read_sequences, tell
from megatron_dppo.compress.choose import BY_REWARD, MEASURES, SCORES, Recipe
from megatron_dppo.compress.command import (
    as_words,
    check_asking,
    check_in_one_process,
    check_in_shards,
    compress,
    device,
    load_whole,
    options_of_both,
)
from megatron_dppo.compress.job import RECORD
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError, error_text
from megatron_dppo.evaluation.answers import SCORES as SCORES_FILE
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import FolderLock, replacing_file
from megatron_dppo.process.streams import quieten
from megatron_dppo.report.tables import frontier_table
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.resume import changes, flat

FILE = "sweep.json"
PROMPTS, NEW_TOKENS, ROUNDS = 16, 64, 3
"""Sizes of a speed measurement."""
MAY_CHANGE = ("layout", "workers", "zero_attention")
"""``options_of_both`` that may change. The others, the policy and CONFIG are the same for every row of a sweep."""

Row = dict[str, Any]


def sweep(chosen: Namespace) -> None:
    """Make what is missing, measure it, write ``sweep.json`` and print the table.

    Raises:
        UserError: for options that say nothing possible, before anything is written; for a command that has failed,
            where what was done before stays.
        SystemExit: with the code of a command that has failed otherwise than by a mistake of the user's.
    """
    quieten()
    if "RANK" in os.environ:
        problem = "is there, and a sweep starts its ranks itself"
        raise UserError("RANK", os.environ["RANK"], problem, "Start it without torchrun or srun")
    if chosen.recover and not chosen.config:
        raise UserError("--recover", chosen.recover, "trains, and no settings say how", "Give --config")
    if chosen.calibrate is None:
        problem = "parts are scored, losses and speeds measured on prompts with responses"
        raise UserError(
            "--calibrate", "(not given)", problem, "Give the --out folder of `megatron-dppo eval`, or a file"
        )
    if not 0 < chosen.enough <= 1:
        raise UserError("--enough", chosen.enough, "is no share", "Give a share above 0 and at most 1")
    named, source = str(chosen.source), policy_folder(str(chosen.source), "MODEL")
    with naming("MODEL"):
        shape, tokenizer = read_shape(source), load_tokenizer(source)
    shares = sorted(set(chosen.keep), reverse=True)
    recipes = [_recipe(word, keep, chosen, shape) for word in chosen.methods for keep in shares]
    if chosen.subnetworks and not any(recipe.subnetworks for recipe in recipes):
        problem = "is for Shapley values, and no method of the sweep has them as its score"
        raise UserError("--subnetworks", chosen.subnetworks, problem, "Give --methods depth:shapley-loss, for instance")
    columns = {"prompt_key": chosen.prompt_key, "response_key": chosen.response_key}
    answers = read_sequences(chosen.calibrate, tokenizer, chat_template=chosen.chat_template, **columns)
    asked = {
        "model": named,
        **{name: value for name, value in options_of_both(chosen).items() if name not in MAY_CHANGE},
        "calibrate": str(chosen.calibrate),
        "settings": flat(load_config(chosen.config[0], chosen.config[1:])) if chosen.config else None,
        "content of --calibrate": digest_of_answers(answers),
        "content of MODEL": _digest_of_model(source),
    }
    with closing(FolderLock(chosen.out, "OUT")), redirect_stdout(sys.stderr):
        found = _Sweep(chosen, source, answers, _read(chosen.out, asked) | {"enough": chosen.enough})
        found.write()  # by what is asked, before anything is there that was made by it
        for recipe in recipes:
            found.measure(recipe)
    print(json.dumps(found.record) if chosen.json else "\n".join(table(found.record)))


def _recipe(word: str, keep: float, chosen: Namespace, shape: PolicyShape) -> Recipe:
    """
    Raises:
        UserError: for what ``compress`` refuses, by the options of a sweep.
    """
    method, score, refit, *more = [*word.split(":"), "", ""]
    if refit not in ("", "refit") or any(more):
        raise UserError("--methods", word, "is not METHOD:SCORE:refit", "Leave out what is behind METHOD:SCORE")
    if method not in SCORES:
        raise UserError("--methods", word, "is no method", f"Give of {', '.join(SCORES)}")
    score = score or SCORES[method][0]
    rest = {name: getattr(chosen, name) for name in ("multiple", "zero_attention", "seed")}
    if score in MEASURES:
        rest["subnetworks"] = chosen.subnetworks
    recipe = Recipe(method, score, keep, refit=bool(refit), **rest)
    try:
        recipe.check(shape)
        recipe.sizes(shape)
        check_asking(score, chosen.config)
        if recipe.refit:
            check_in_one_process("--refit", score, chosen.layout)
        if chosen.layout is not None:
            check_in_shards(recipe.score, chosen.layout)
    except UserError as error:
        named = (
            ("--methods", word) if error.setting in ("--method", "--score", "--refit") else (error.setting, error.value)
        )
        texts = [str(text).replace("--refit", ":refit") for text in (error.problem, error.remedy)]
        texts = [re.sub("--(method|score)", "--methods", text) for text in texts]
        raise UserError(*named, *texts) from error
    return recipe


def _digest_of_model(folder: Path) -> str:
    """Digest of config.json and the files of the weights."""
    with naming("MODEL"):
        weights = sorted({tensor.file for tensor in stored_tensors(folder).values()})
    seen = hashlib.blake2b(digest_size=16)
    for file in (folder / "config.json", *weights):
        with file.open("rb") as opened:
            seen.update(hashlib.file_digest(opened, "blake2b").digest())
    return seen.hexdigest()


def _free() -> None:
    """Give back what models have held that nothing refers to any more, also in a cycle."""
    gc.collect()
    torch.cuda.empty_cache()


def _read(out: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Record of an earlier command, or a new one.

    Raises:
        UserError: if it was asked otherwise: its rows are not to be compared with new ones.
    """
    if not (out / FILE).is_file():
        return {"asked": dict(asked), "whole": {}, "rows": []}
    record: dict[str, Any] = json.loads((out / FILE).read_text(encoding="utf-8"))
    before, now = record["asked"].get("settings"), asked["settings"]
    differ = [name for name in asked if name != "settings" and record["asked"].get(name) != asked[name]]
    if before and now:  # --config may come later, and be left out again
        differ += [change.key for change in changes(before, now)]
    record["asked"]["settings"] = before or now
    if differ:
        problem = f"holds a sweep with another {', '.join(differ)}, and rows of both cannot be compared"
        raise UserError("OUT", out, problem, "Name another folder")
    return record


@dataclass(slots=True)
class _Sweep:
    chosen: Namespace
    source: Path
    answers: Sequence[WorkedAnswer]
    record: dict[str, Any]

    def measure(self, recipe: Recipe) -> None:
        """All that is known of one smaller policy; what is there is not measured again."""
        name = f"{recipe.method}-{recipe.score}-{recipe.keep:g}" + "-refit" * recipe.refit
        folder = self.chosen.out / name
        row: Row = next((row for row in self.record["rows"] if row["name"] == name), {"name": name})
        if len(row) == 1:
            self.record["rows"].append(row)
        if not (folder / "policy" / RECORD).is_file():
            tell(f"{name}: compressing")
            folder.mkdir(parents=True, exist_ok=True)
            self._compress(recipe, folder / "policy")
        forget(folder / "policy")  # a kill may have come when they were of no use any more
        done = json.loads((folder / "policy" / RECORD).read_text())
        row |= {key: done[key] for key in ("method", "score", "keep", "loss_before", "loss_after")}
        row |= {"weights": done["weights_after"], "refit": recipe.refit}
        if recipe.refit:
            row["loss_without_refit"] = done["loss_without_refit"]
        self.record["whole"] |= {"weights": done["weights_before"], "loss": done["loss_before"]}
        if "tokens_per_second" not in row and self.chosen.layout is None:
            tell(f"{name}: tokens per second")
            row |= self._speed(folder / "policy")
            _free()
        self.write()
        if self.chosen.config:
            if "accuracy" not in self.record["whole"]:
                self.record["whole"]["accuracy"] = self._accuracy(self.source, self.chosen.out / "whole" / "eval")
            row["accuracy"] = self._accuracy(folder / "policy", folder / "eval")
            self._recover(row, folder)
        self.write()

    def _compress(self, recipe: Recipe, out: Path) -> None:
        kept = {name: getattr(recipe, name) for name in ("method", "score", "keep", "subnetworks", "refit")}
        options = options_of_both(self.chosen) | kept
        by_reward = recipe.score == BY_REWARD
        if self.chosen.layout is not None or by_reward:  # ranks of their own leave nothing behind in this process
            config = ["--config", *self.chosen.config] if by_reward else []
            option = ("--config", " ".join(self.chosen.config)) if by_reward else ("--layout", self.chosen.layout)
            self._run(*option, "compress", self.source, out, *as_words(options), *config)
            return
        rest = dict.fromkeys(("verify", "dry_run", "overwrite", "config"))
        compress(Namespace(**options, **rest, source=self.source, out=out), [])
        _free()

    def _recover(self, row: Row, folder: Path) -> None:
        """Train with growing budgets, each from the start and with its own schedule, until one is enough."""
        recovered = row.setdefault("recovered", [])
        for steps in sorted(set(self.chosen.recover)):
            fewer = [point for point in recovered if point["steps"] < steps]
            if recovery_tokens({**row, "recovered": fewer}, self._enough()) is not None:
                break
            if steps in (point["steps"] for point in recovered):
                continue
            out, run = folder / f"sft-{steps}", folder / f"sft-{steps}-run"
            if not (out / "config.json").is_file():
                settings = {"model.path": folder / "policy", "run.dir": run, "sft.out": out, "sft.steps": steps}
                self._run_with_config("sft", *(f"{name}={value}" for name, value in settings.items()))
            lines = (run / "sft-log" / "metrics.jsonl").read_text().splitlines()
            tokens = sum(json.loads(line)["train/tokens"] for line in lines)
            accuracy = self._accuracy(out, folder / f"sft-{steps}-eval")
            recovered.append({"steps": steps, "tokens": tokens, "accuracy": accuracy})
            recovered.sort(key=lambda point: point["steps"])
            self.write()

    def _enough(self) -> float:
        """Accuracy that counts as recovered; none is never enough."""
        return max(self.chosen.enough * float(self.record["whole"]["accuracy"]), 1e-9)

    def _accuracy(self, policy: Path, out: Path) -> float:
        """Mean over the benchmarks."""
        if not (out / SCORES_FILE).is_file():
            self._run_with_config("eval", "--model", policy, "--out", out)
        scores = json.loads((out / SCORES_FILE).read_text())["benchmarks"].values()
        return float(sum(of["avg@k"]["value"] for of in scores) / len(scores))

    def _run_with_config(self, command: str, *words: Any) -> None:
        self._run("--config", " ".join(self.chosen.config), command, *self.chosen.config, *words)

    def _run(self, option: str, value: str, *words: Any) -> None:
        """A command as a process of its own.

        Args:
            option: that it is run by, with its ``value``, for errors.
            words: of the command line.

        Raises:
            UserError: if it fails; it has said why.
            SystemExit: if it fails with another code than 2, with that code.
        """
        text = [*map(str, words)]
        tell("megatron-dppo " + " ".join(text))
        done = subprocess.run([sys.executable, "-m", "megatron_dppo", *text], stdout=sys.stderr, check=False)
        if done.returncode:
            code = done.returncode if done.returncode > 0 else 128 - done.returncode
            ended = f"code {code}, and has said why above" if code < 128 else f"signal {code - 128}"
            problem = f"`megatron-dppo {' '.join(text)}` ended with {ended}"
            error = UserError(option, value, problem, "Mend that, and run the sweep again")
            if code == 2:
                raise error
            tell(error_text(error))
            raise SystemExit(code)

    def _speed(self, policy: Path) -> dict[str, float]:
        """Tokens per second of the smaller policy, and over that of the whole one, measured in turn: the best of each,
        since whatever else the machine does only slows them down."""
        prompts = [answer.prompt_ids for answer in draw(self.answers, PROMPTS, self.chosen.seed)[0]]
        width = max(map(len, prompts))
        tokens, valid = torch.zeros(2, len(prompts), width, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :], valid[i, width - len(prompt) :] = torch.from_numpy(prompt).long(), 1
        tokens, valid = tokens.to(device()), valid.to(device())
        whole = load_whole(self.source, read_shape(self.source), torch.bfloat16)
        small = load_whole(policy, read_shape(policy), whole.dtype).to(whole.dtype)
        best = [0.0, 0.0]
        for _ in range(ROUNDS):
            best = [
                max(old, _tokens_per_second(of, tokens, valid)) for old, of in zip(best, (small, whole), strict=True)
            ]
        return {"tokens_per_second": best[0], "tokens_per_second_ratio": best[0] / best[1]}

    def write(self) -> None:
        """Also what depends on all rows, and on ``--enough``."""
        for row in self.record["rows"]:
            if "accuracy" in row:
                row["recovery_tokens"] = recovery_tokens(row, self._enough())
        mark_frontier(self.record["rows"])
        with replacing_file(self.chosen.out / FILE) as partial:
            partial.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def _tokens_per_second(model: Any, tokens: torch.Tensor, valid: torch.Tensor) -> float:
    """Speed of transformers' ``generate``, equally many for every prompt."""
    began = time.perf_counter()
    size = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    model.generate(input_ids=tokens, attention_mask=valid, do_sample=False, **size).cpu()
    return len(tokens) * NEW_TOKENS / (time.perf_counter() - began)


def recovery_tokens(row: Row, enough: float) -> float | None:
    """The least number of trained tokens that gives an accuracy of ``enough``; 0 where none are needed, None where no
    budget was enough."""
    tried = [{"tokens": 0.0, "accuracy": row["accuracy"]}, *row.get("recovered", [])]
    return min((point["tokens"] for point in tried if point["accuracy"] >= enough), default=None)


def worth(row: Row) -> float:
    """The best accuracy that a smaller policy came to; without any, the loss, negated."""
    if "accuracy" not in row:
        return -float(row["loss_after"])
    return float(max([row["accuracy"], *(point["accuracy"] for point in row.get("recovered", []))]))


def mark_frontier(rows: Sequence[Row]) -> None:
    """Mark the rows that no other beats: none is as small or smaller and better, or smaller and as good."""
    known = [row for row in rows if "accuracy" in row] or [row for row in rows if "loss_after" in row]
    found = [(-row["weights"], worth(row)) for row in known]
    for row in rows:
        row["frontier"] = row in known and not any(
            a >= -row["weights"] and b >= worth(row) and (a, b) != (-row["weights"], worth(row)) for a, b in found
        )


def table(record: Mapping[str, Any]) -> list[str]:
    """A line for each policy, the largest first."""
    rows = frontier_table(record)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([f"{name:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    ]
    mark = "✓: no other is as small and better, or smaller and as good"
    if any("tokens_per_second" not in row for row in record["rows"]):
        lines.append("speed –: it takes the whole policy in one process; run the sweep again without --layout")
    return [*lines, f"{mark}; tokens: of sft, to {100 * record['enough']:g}% of the whole policy's accuracy"]
