"""Model card from a run's files: base model, training data and results.

Cards are public: no folders, hosts, accounts, environments or servers' command lines, and only
settings that affect the result.
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
from megatron_dppo.models.shape import match_published_model
from megatron_dppo.observe.metrics import compute_summary
from megatron_dppo.observe.private import map_texts, mask_secrets
from megatron_dppo.report.charts import format_number
from megatron_dppo.report.learning import compute_wilson_interval
from megatron_dppo.report.run import Record, RunRecord, get_data_names, get_default
from megatron_dppo.settings import format_value, get_settings
from megatron_dppo.trainer.resume import PLACES

# An allow list, so that a new setting stays private.
SHOWN = (
    "run.seed",
    "run.steps",
    "model.",
    "layout.",
    "data.",
    "reward.function",
    "loss.",
    "pruning.",
    "pack.",
    "optimizer.",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.temperature",
    "rollout.max_response_tokens",
    "rollout.ahead",
)
TAG = "megatron-dppo"
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Model name on the hub."""
FUNCTION = re.compile(r"\.py(:[\w.]+)?$")
"""End of a setting that names a function in a file."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")


def render_model_card(run: RunRecord, *, step: int, name: str, adapters: bool = False) -> str:
    """Return the text of ``README.md``.

    Args:
        step: step of the checkpoint; later measurements are left out.
        name: name of the model.
        adapters: True for adapters alone, for PEFT.
    """
    base = find_base_model(run)
    data = get_data_names(run)
    library = "peft" if adapters else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    # The hub refuses a card whose base model is no id.
    if MODEL_ID.fullmatch(base):
        head["base_model"] = base
    if results := list(_list_results(run, step)):
        head["model-index"] = [{"name": " ".join(name.split()), "results": results}]
    head["tags"] = ["reinforcement-learning", "dynamic-pruning-policy-optimization", TAG]
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", f"# {_plain(name)}", ""]
    subject = f"LoRA adapters of {_format_code(base)}" if adapters else _format_code(base)
    subject += (
        f", trained for {step:,} steps of reinforcement learning on {_format_code(data)} with "
        "megatron_dppo."
    )
    lines += [
        f"{subject} Objective: {_format_code(run.get_setting('loss.name'))}. "
        f"{_describe_pruning(run)}",
        "",
    ]
    sections = {
        "Held-out accuracy": _render_accuracy(run, step),
        "Training": _render_training(run, step),
        "Settings that differ from the defaults": _render_settings(run),
        "Versions": _render_versions(),
    }
    for title, body in sections.items():
        lines += [f"## {title}", "", *(list(body) or ["Nothing was recorded."]), ""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a single line, escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(str(text).split()))


def _format_code(text: object) -> str:
    return "`" + " ".join(str(text).split()).replace("`", "'").replace("|", "\\|") + "`"


def find_base_model(run: RunRecord) -> str:
    """Return a hub id (also for a published Qwen3), else the folder's name."""
    place = str(run.get_setting("model.path") or "")
    name = _get_name(place)
    return place if is_id(place) else f"Qwen/{name}" if match_published_model(name) else name


def _get_name(place: Any) -> str:
    return PurePath(str(place or "")).name or "(not recorded)"


def _describe_pruning(run: RunRecord) -> str:
    parts = []
    for level in ("prompts", "completions"):
        own = run.get_setting(f"pruning.{level}.function")
        if (rule := "function" if own else run.get_setting(f"pruning.{level}.rule")) != "none":
            parts.append(f"{level} by {_format_code(rule)}")
    return f"Pruning: {', '.join(parts)}." if parts else "Nothing was pruned."


def _select_rows(run: RunRecord, step: int) -> list[Record]:
    return [row for row in run.rows if step >= row["step"]]


def _collect_accuracies(run: RunRecord, step: int) -> dict[str, list[tuple[float, float]]]:
    """Return (step, accuracy) pairs by metric."""
    rows = _select_rows(run, step)
    names = sorted({key for row in rows for key in row if key.startswith("eval/")})
    names = [
        key for key in names if key == "eval/accuracy" or key.removeprefix("eval/") in run.problems
    ]
    found: dict[str, list[tuple[float, float]]] = {}
    for key in names:
        found[key] = [(row["step"], row[key]) for row in rows if key in row]
    return found


def _list_results(run: RunRecord, step: int) -> Iterator[dict[str, Any]]:
    """Yield the last accuracies as ``model-index``."""
    for key, values in _collect_accuracies(run, step).items():
        data_set = " ".join(_describe_held_out(run, key).split())
        metric = {"type": "accuracy", "name": "held-out accuracy", "value": round(values[-1][1], 6)}
        yield {
            "task": {"type": "text-generation"},
            "dataset": {"type": data_set, "name": data_set},
            "metrics": [metric],
        }


def _render_accuracy(run: RunRecord, step: int) -> Iterator[str]:
    """Yield a table of the first and last accuracies."""
    found = _collect_accuracies(run, step)
    if not found:
        return
    yield "| held-out problems | number | before | after |"
    yield "|---|---|---|---|"
    for key, values in found.items():
        count = run.held_out if key == "eval/accuracy" else run.problems[key.removeprefix("eval/")]
        label = _plain(_describe_held_out(run, key))
        (_, before) = values[0]
        (last, after) = values[-1]
        yield (
            f"| {label} | {count or ''} | {format_number(before, 'share')} | "
            f"{_format_share(after, count)} (step {last:,.0f}) |"
        )
    yield ""
    yield "In brackets Wilson's 95% interval over the problems, where their number is known."


def _describe_held_out(run: RunRecord, key: str) -> str:
    if key != "eval/accuracy":
        return key.removeprefix("eval/")
    data_sets = run.get_setting("data.eval")
    files = [data_sets] if data_sets else []
    if isinstance(data_sets, dict):
        files = list(data_sets.values())
    names = [*map(_get_name, files), *run.get_setting("eval.benchmarks")]
    return ", ".join(names) or f"{get_data_names(run)}, held out"


def _format_share(share: float, trials: int | None) -> str:
    if not trials:
        return format_number(share, "share")
    low, high = compute_wilson_interval(share, trials)
    return f"{format_number(share, 'share')} [{100 * low:.1f}, {100 * high:.1f}]"


def _render_training(run: RunRecord, step: int) -> Iterator[str]:
    found = compute_summary(_select_rows(run, step))
    if not found["steps"]:
        return
    yield (
        f"- {found['generated_tokens']:,} tokens generated, {found['trained_tokens']:,} trained "
        "on, prompts included"
    )
    prompts = found["kept_prompt_fraction"]
    tokens = found["kept_token_fraction"]
    if prompts is not None and tokens is not None:
        yield (
            f"- {prompts:.0%} of the prompts were rolled out, and {tokens:.0%} of their tokens "
            "trained on"
        )
    ranks = run.compute_mean("perf/ranks")
    on = f" on {ranks:.0f} ranks" if ranks else ""
    yield f"- {found['seconds']:,.0f} s in steps and evaluations{on}"
    changed = {change.key for _, changes in run.changes for change in changes}
    for key in sorted(changed):
        if key.startswith(SHOWN):
            yield f"- `{key}` changed during the run; the table has its last value"


def _render_settings(run: RunRecord) -> Iterator[str]:
    differ = {
        key: value
        for key in get_settings()
        if key.startswith(SHOWN) and (value := run.get_setting(key)) not in (None, get_default(key))
    }
    if not differ:
        return
    yield "| setting | value |"
    yield "|---|---|"
    for key, value in differ.items():
        shown = map_texts(mask_secrets(key, value), partial(_strip_path, key))
        yield f"| {_format_code(key)} | {_format_code(format_value(shown))} |"


def _strip_path(key: str, value: str) -> str:
    """Return a path's name without the folder; other values unchanged."""
    if is_server(value):
        return "a server"
    named = key.startswith(PLACES) or FUNCTION.search(value) or value.startswith(("/", "~", "."))
    # Text with spaces is a path only if the path exists: prompts have slashes, too.
    has_path = named or ("/" in value and (" " not in value or Path(value).exists()))
    return _get_name(value) if has_path else value


def _render_versions() -> Iterator[str]:
    yield f"- megatron-dppo {__version__}"
    for package in PACKAGES:
        try:
            yield f"- {package} {version(package)}, where the card was written"
        except PackageNotFoundError:
            continue
