"""A model card, made from what a run has written: what it began from, what it was trained on, and
what it came to.

A card is for the public. It has the names of files and never their places, and of the settings only
those that say what the policy is a result of: no host, no account, no environment and no command
line of a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

import yaml

from megatron_dppo import __version__
from megatron_dppo.config.loss import is_server
from megatron_dppo.hub import is_id
from megatron_dppo.models.shape import published
from megatron_dppo.observe.metrics import summarise
from megatron_dppo.observe.private import map_texts, public
from megatron_dppo.report.charts import say
from megatron_dppo.report.learning import wilson
from megatron_dppo.report.run import Record, RunRecord, data_of, default_of
from megatron_dppo.settings import settings, short
from megatron_dppo.trainer.resume import PLACES

SHOWN = ("run.seed", "run.steps", "model.", "layout.", "data.", "reward.function", "loss.",
"pruning.", "pack.",
         "optimizer.", "rollout.prompts_per_step", "rollout.samples_per_prompt",
         "rollout.temperature",
         "rollout.max_response_tokens", "rollout.ahead")  # fmt: skip
"""Settings that a card may tell."""
TAG = "megatron-dppo"
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Pattern of a model's name on the hub."""
FUNCTION = re.compile(r"\.py(:[\w.]+)?$")
"""End of a setting that names a function in a file."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")


def model_card(run: RunRecord, *, step: int, name: str, adapters: bool = False) -> str:
    """The text of ``README.md``, for a checkpoint of a run.

    Args:
        run: whose checkpoint it is.
        step: that the checkpoint was saved after. What was measured later is left out.
        name: of the model.
        adapters: whether it is the adapters alone, for PEFT.
    """
    base, data = base_of(run), data_of(run)
    library = "peft" if adapters else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if MODEL_ID.fullmatch(base):
        head["base_model"] = base
    if results := list(_results(run, step)):
        head["model-index"] = [{"name": " ".join(name.split()), "results": results}]
    head["tags"] = ["reinforcement-learning", "dynamic-pruning-policy-optimization", TAG]
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", f"# {_plain(name)}", ""]
    what = f"LoRA adapters of {_code(base)}" if adapters else _code(base)
    what += (
        f", trained for {step:,} steps of reinforcement learning on {_code(data)} with "
        "megatron_dppo."
    )
    lines += [f"{what} Objective: {_code(run.setting('loss.name'))}. {_pruning(run)}", ""]
    sections = {
        "Held-out accuracy": _accuracy(run, step),
        "Training": _training(run, step),
        "Settings that differ from the defaults": _settings(run),
        "Versions": _versions(),
    }
    for title, body in sections.items():
        lines += [f"## {title}", "", *(list(body) or ["Nothing was recorded."]), ""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Words in one line, none of whose letters Markdown or HTML take for their own."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(str(text).split()))


def _code(text: object) -> str:
    """Words as code, in one line."""
    return "`" + " ".join(str(text).split()).replace("`", "'").replace("|", "\\|") + "`"


def base_of(run: RunRecord) -> str:
    """Base model of a run: an id of the hub, also that of a published Qwen3, or else the name of
    its folder."""
    place = str(run.setting("model.path") or "")
    name = _name(place)
    return place if is_id(place) else f"Qwen/{name}" if published(name) else name


def _name(place: Any) -> str:
    return PurePath(str(place or "")).name or "(not recorded)"


def _pruning(run: RunRecord) -> str:
    parts = []
    for level in ("prompts", "completions"):
        own = run.setting(f"pruning.{level}.function")
        if (rule := "function" if own else run.setting(f"pruning.{level}.rule")) != "none":
            parts.append(f"{level} by {_code(rule)}")
    return f"Pruning: {', '.join(parts)}." if parts else "Nothing was pruned."


def _until(run: RunRecord, step: int) -> list[Record]:
    """The rows that were written before the checkpoint was."""
    return [row for row in run.rows if step >= row["step"]]


def _accuracies(run: RunRecord, step: int) -> dict[str, list[tuple[float, float]]]:
    """Accuracies up to the checkpoint's step: steps and accuracies, by the metric's name."""
    rows = _until(run, step)
    names = sorted({key for row in rows for key in row if key.startswith("eval/")})
    names = [
        key for key in names if key == "eval/accuracy" or key.removeprefix("eval/") in run.problems
    ]
    return {key: [(row["step"], row[key]) for row in rows if key in row] for key in names}


def _results(run: RunRecord, step: int) -> Iterator[dict[str, Any]]:
    """The last accuracies, as the hub reads them from ``model-index``."""
    for key, values in _accuracies(run, step).items():
        of = " ".join(_held_out(run, key).split())
        metric = {"type": "accuracy", "name": "held-out accuracy", "value": round(values[-1][1], 6)}
        yield {
            "task": {"type": "text-generation"},
            "dataset": {"type": of, "name": of},
            "metrics": [metric],
        }


def _accuracy(run: RunRecord, step: int) -> Iterator[str]:
    """Before training, and at the last evaluation up to the checkpoint's step."""
    found = _accuracies(run, step)
    if not found:
        return
    yield "| held-out problems | number | before | after |"
    yield "|---|---|---|---|"
    for key, values in found.items():
        count = run.held_out if key == "eval/accuracy" else run.problems[key.removeprefix("eval/")]
        what = _plain(_held_out(run, key))
        (_, before), (last, after) = values[0], values[-1]
        yield (
            f"| {what} | {count or ''} | {say(before, 'share')} | {_sure(after, count)} (step "
            f"{last:,.0f}) |"
        )
    yield ""
    yield "In brackets Wilson's 95% interval over the problems, where their number is known."


def _held_out(run: RunRecord, key: str) -> str:
    if key != "eval/accuracy":
        return key.removeprefix("eval/")
    asked = run.setting("data.eval")
    files = list(asked.values()) if isinstance(asked, dict) else [asked] if asked else []
    names = [*map(_name, files), *run.setting("eval.benchmarks")]
    return ", ".join(names) or f"{data_of(run)}, held out"


def _sure(share: float, of: int | None) -> str:
    if not of:
        return say(share, "share")
    low, high = wilson(share, of)
    return f"{say(share, 'share')} [{100 * low:.1f}, {100 * high:.1f}]"


def _training(run: RunRecord, step: int) -> Iterator[str]:
    found = summarise(_until(run, step))
    if not found["steps"]:
        return
    yield (
        f"- {found['generated_tokens']:,} tokens generated, {found['trained_tokens']:,} trained "
        "on, prompts included"
    )
    if (prompts := found["kept_prompt_fraction"]) is not None and (
        tokens := found["kept_token_fraction"]
    ) is not None:
        yield (
            f"- {prompts:.0%} of the prompts were rolled out, and {tokens:.0%} of their tokens "
            "trained on"
        )
    ranks = run.mean("perf/ranks")
    on = f" on {ranks:.0f} ranks" if ranks else ""
    yield f"- {found['seconds']:,.0f} s in steps and evaluations{on}"
    for changed in sorted(
        {change.key for _, of in run.changes for change in of if change.key.startswith(SHOWN)}
    ):
        yield f"- `{changed}` was changed on the way; what stands below is its last value"


def _settings(run: RunRecord) -> Iterator[str]:
    differ = {
        key: value
        for key in settings()
        if key.startswith(SHOWN) and (value := run.setting(key)) not in (None, default_of(key))
    }
    if not differ:
        return
    yield "| setting | value |"
    yield "|---|---|"
    for key, value in differ.items():
        yield (
            f"| {_code(key)} | "
            f"{_code(short(map_texts(public(key, value), partial(_without_place, key))))} |"
        )


def _without_place(key: str, value: str) -> str:
    """A name in the place of a path."""
    if is_server(value):
        return "a server"
    named = key.startswith(PLACES) or FUNCTION.search(value) or value.startswith(("/", "~", "."))
    return (
        _name(value)
        if named or ("/" in value and (" " not in value or Path(value).exists()))
        else value
    )


def _versions() -> Iterator[str]:
    yield f"- megatron-dppo {__version__}"
    for package in PACKAGES:
        try:
            yield f"- {package} {version(package)}, where the card was written"
        except PackageNotFoundError:
            continue
