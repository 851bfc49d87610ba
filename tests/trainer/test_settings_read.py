"""What short real runs read of their settings: a changed setting that a run does not read is named, no other is."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from megatron_dppo.config import Config
from megatron_dppo.config.types import Section
from megatron_dppo.settings import load_config, settings
from megatron_dppo.sft import sft
from megatron_dppo.train import train
from megatron_dppo.trainer.run_logger import idle_settings
from tests.ranks import RankPool
from tests.small_runs import write_run

SMALL = (
    "run.steps=2", "run.checkpoint_every=1", "run.export=false", "layout.dp=1", "data.chat_template=false",
    "data.max_prompt_tokens=24", "data.arithmetic.problems=16", "data.arithmetic.eval_problems=4", "eval.every=1",
    "eval.problems=4", "rollout.max_response_tokens=9", "rollout.samples_per_prompt=4", "rollout.prompts_per_step=4",
    "pack.max_tokens=256", "sft.steps=1", "sft.batch=4",
)  # fmt: skip
FROM_A_FILE = "data.train={folder}/rows.jsonl"
KINDS: Mapping[str, tuple[str, ...]] = {
    "pruned": (
        "pruning.prompts.schedule.shape=cosine", "pruning.completions.keep=0.5",
        "pruning.completions.schedule.shape=linear",
    ),
    "neither pruned nor evaluated": (
        "pruning.prompts.rule=none", "pruning.completions.rule=none", "eval.problems=0", "optimizer.schedule=cosine"
    ),
    "adapters, ahead": (
        FROM_A_FILE, "data.eval={folder}/rows.jsonl", "model.lora.rank=2", "rollout.ahead=1", "loss.kl_coef=0.1"
    ),
    "trees": (FROM_A_FILE, "loss.name=dr_grpo", "rollout.tree.branches=[{{at: 3}}]", "eval.benchmarks=[arithmetic]"),
    "rounds, own engine": (
        FROM_A_FILE, "pruning.prompts.rule=dynamic_sampling", "pruning.completions.rule=top_k",
        "rollout.engine_function={folder}/own.py:engine", "eval.benchmarks=[own={folder}/rows.jsonl]",
    ),
    "distilled": (
        "pruning.prompts.rule=none", "pruning.completions.rule=threshold",
        "loss.distillation.teacher={folder}/hf", "loss.trust_region=tv",
    ),
    "offline": ("data.rollouts={folder}/rollouts.jsonl", "loss.kl_coef=0.1", "model.spec=torch"),
    "conversations": (FROM_A_FILE, "rollout.conversation={folder}/own.py:talk"),
}  # fmt: skip
UNNAMED = {
    "sft.": "other commands'",
    "probe.": "other commands'",
    "cluster.": "other commands'",
    "data.response_key": "sft's",
    "eval.against": "eval's",
    "eval.batch": "eval's",
    "eval.out": "eval's",
    "run.resume": "read before a run that resumes",
    "rollout.tree.roots": "checked before a run, and refused beside other numbers",
    "data.overlong_prompts": "read if a prompt is too long",
    "loss.distillation.teacher_checkpoint": "refused without a teacher",
    "model.reference_on_host": "refused with adapters",
    "rollout.custom_generate": "refused with the local engine",
}
"""Beginnings of keys of settings that some run does not read, and why none needs to say so."""
PASSED_ON = ("reward.concurrency", "loss.tis_level", "optimizer.min_lr", "pruning.", "eval.every")
"""Beginnings of keys of settings without effect that are read all the same, and passed on to code that ignores them."""
OWN = """
from megatron_dppo.rollout.local import LocalEngine

async def talk(client, prompt):
    return [await client.generate(prompt.token_ids)]

def engine(path, *, device, dtype, world):
    return LocalEngine(path, device=device, dtype=dtype, max_batch=64, world=world)
"""
SectionT = TypeVar("SectionT", bound=Section)
NOT_THE_RUNS = ("trainer/preflight.py", "trainer/resume.py", "trainer/fingerprints.py")
"""Files whose reads, like those of ``idle_settings``, are no reads of the run."""


class Reads:
    """The dotted keys of settings that a run has read, by whichever attribute."""

    def __init__(self, config: Config) -> None:
        self.keys: set[str] = set()
        self._places: dict[int, tuple[Section, str]] = {}
        self._add(config, "")

    def _add(self, section: Section, prefix: str) -> None:
        self._places[id(section)] = section, prefix
        for name, value in section:
            if isinstance(value, Section):
                self._add(value, f"{prefix}{name}.")

    def add(self, section: Section, name: str) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith(NOT_THE_RUNS) or code.co_name == idle_settings.__name__:
                return
            frame = frame.f_back
        prefixes = [place for known, place in self._places.values() if known is section]
        prefixes = prefixes or [place for known, place in self._places.values() if type(known) is type(section)]
        self.keys |= {prefix + name for prefix in prefixes}


@contextlib.contextmanager
def recorded(config: Config) -> Iterator[Reads]:
    reads, plain = Reads(config), Section.__getattribute__

    def recording(section: Section, name: str) -> Any:
        if name in type(section).model_fields:
            reads.add(section, name)
        return plain(section, name)

    Section.__getattribute__ = recording
    try:
        yield reads
    finally:
        Section.__getattribute__ = plain


def read(rank: int, size: int, config: Config, run: Callable[[Config], None]) -> set[str]:
    stays = mock.patch(f"{run.__module__}.shut_down")  # the next run of this process is in the same group
    with stays, recorded(config) as reads, contextlib.redirect_stdout(io.StringIO()):
        run(config)
    return reads.keys


def test_a_changed_setting_is_named_if_and_only_if_the_run_does_not_read_it(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(6)]
    completions = [{"token_ids": [9, 2], "logprobs": [-0.1, -0.2], "reward": float(reward)} for reward in (0, 1, 0, 1)]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "rollouts.jsonl", [{"prompt": row["prompt"], "completions": completions} for row in rows])
    (folder / "own.py").write_text(OWN)
    configs = {}
    for kind, words in KINDS.items():
        own = (
            f"run.dir={folder}/{kind}",
            f"model.path={folder}/hf",
            f"reward.function={folder}/mixed.py:compute_score",
        )
        configs[kind] = load_config(None, [*SMALL, *own, *(word.format(folder=folder) for word in words)])
    found = ranks.in_turn(1, *((read, config, train) for config in configs.values()), (read, configs["pruned"], sft))
    *of_runs, of_sft = [of_ranks[0] for of_ranks in found]
    assert {key for key in settings() if key.startswith("sft.")} | {"data.response_key"} <= of_sft
    for (kind, config), keys in zip(configs.items(), of_runs, strict=True):
        named = {key for key in settings() if key in idle_settings(with_other(config, key))}
        unread = {key for key in settings().keys() - keys if not key.startswith((*UNNAMED,))}
        assert unread - named == set(), f"{kind}: read by nobody and not named"
        assert {key for key in named & keys if not key.startswith(PASSED_ON)} == set(), f"{kind}: named, and read"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_other(section: SectionT, key: str) -> SectionT:
    """With another value of one setting, which need not be a sensible one."""
    name, _, rest = key.partition(".")
    value = getattr(section, name)
    return section.model_copy(update={name: with_other(value, rest) if rest else other(value)})


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case dict():
            return {**value, "other": "other"}
        case tuple():
            return (*value, "other=other")
        case _:
            return "other"
