"""The HTML report: every section, comparisons, damaged folders, masked secrets, escaped text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.config import CompletionPruningConfig, PruningConfig
from megatron_dppo.errors import UserError
from megatron_dppo.report.page import render_page, report
from megatron_dppo.report.run import read_runs
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.resume import record_settings
from tests.report.made_up import UNPRUNED, write_lines, write_run

SECTIONS = (
    "learning",
    "time",
    "pruning",
    "packs",
    "signs",
    "answers",
    "benchmarks",
    "cost",
    "settings",
)


class Elements(HTMLParser):
    """All tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data + " "

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name and value is not None]


def write(*folders: Path, price: float | None = None) -> Elements:
    return Elements(render_page(read_runs(folders), price))


def test_page_has_every_section_with_its_figures(tmp_path: Path) -> None:
    shown = write(write_run(tmp_path / "run"), price=2.0)
    assert tuple(each for each in shown.values("id") if each in SECTIONS) == SECTIONS
    for said in (
        "25.0 → 75.0%",
        "61.5–84.9% is the 95% interval of 50 problems",
        "0.4 → 0.662",
        "6 steps of 2.00 s",
        "75% of the prompts rolled out, 45% of their tokens trained on",
    ):
        assert said in shown.text
    assert "not at its end" not in shown.text


def test_comparison_lists_only_different_settings(tmp_path: Path) -> None:
    shown = write(write_run(tmp_path / "a"), write_run(tmp_path / "b", pruning=UNPRUNED))
    after = shown.text[
        shown.text.index("Only what differs") : shown.text.index("All settings of a")
    ]
    assert after.split()[6:] == [
        "setting", "a", "b", "pruning.prompts.rule", "neyman", "none", "pruning.completions.rule",
        "neyman", "none",
        "pruning.completions.keep", "auto", "0.4",
    ]  # fmt: skip
    assert "a 2.00 s; b 2.00 s, 1.00 times as long" in shown.text


def test_rewards_under_pruned_prompts_are_called_incomparable(tmp_path: Path) -> None:
    words = "Rewards of these runs are not comparable: a run that prunes prompts chooses"
    pruned = write_run(tmp_path / "pruned")
    whole = [write_run(tmp_path / name, pruning=UNPRUNED) for name in "ab"]
    assert words in write(whole[0], pruned).text
    assert words not in write(pruned).text and words not in write(*whole).text


def test_unwritable_output_is_refused_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, pictures in (
        (tmp_path / "file/report.html", None),
        (tmp_path / "report.html", tmp_path / "file/png"),
    ):
        with pytest.raises(
            UserError, match=r"cannot be written: (File exists|Not a directory)"
        ) as caught:
            report([write_run(tmp_path / "run")], place, png=pictures)
        assert caught.value.setting == ("--png" if pictures else "--out")


@pytest.mark.parametrize(
    ("key", "words", "shown"),
    [
        ("env", ["HF_TOKEN=hunter2", "A=hunter"], ["HF_TOKEN=…", "A=…"]),
        ("command", ["env", "HF_TOKEN=hunter2", "serve"], ["env", "HF_TOKEN=…", "serve"]),
        ("command", ["bash", "-c", "API_KEY=hunter2 serve"], ["bash", "-c", "API_KEY=…"]),
        (
            "flags",
            ["--api-key", "hunter2-key", "x", "--tp", "2"],
            ["--api-key", "…", "x", "--tp", "2"],
        ),
        (
            "flags",
            ["--password=hunter2", "--admin-token hunter 2"],
            ["--password=…", "--admin-token …"],
        ),
        ("flags", ["-H", "Authorization: Bearer hunter2"], ["-H", "Authorization: Bearer …"]),
        ("flags", ["--extra", '{"secret": "hunter2"}'], ["--extra", '{"secret": …']),
        (
            "flags",
            ["--ssl-key", "--max-total-tokens", "8192"],
            ["--ssl-key", "--max-total-tokens", "8192"],
        ),
    ],
)
def test_secrets_of_servers_are_masked(
    tmp_path: Path, key: str, words: list[str], shown: list[str]
) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "config.yaml").read_text().splitlines()
    changed = [
        f"    {key}: {json.dumps(words)}" if line.startswith(f"    {key}: ") else line
        for line in lines
    ]
    (run / "config.yaml").write_text("\n".join(changed))
    text = write(run, write_run(tmp_path / "other")).text
    assert "hunter" not in text
    assert text.count(str(shown)) == 2  # among the differences, and among all settings


def test_page_has_no_key_or_password(tmp_path: Path) -> None:
    """Neither of the settings in force nor of earlier ones."""
    run = write_run(tmp_path / "run")
    secrets = (
        "data.verifiers.arguments={key: hunter2}",
        "loss.distillation.teacher=http://me:hunter2@host",
    )
    for step, more in (
        (0, "data.chat_template_kwargs={a: hunter2}"),
        (3, "rollout.servers=[http://a:hunter2@b]"),
    ):
        record_settings(run, step, load_config(None, [f"run.dir={run}", *secrets, more]))
    text = render_page(read_runs([run]))
    assert "hunter" not in text
    assert text.count("http://***@host") == 2 and "http://***@b" in text


def test_biased_rule_is_shown_with_its_reason(tmp_path: Path) -> None:
    biased = PruningConfig(completions=CompletionPruningConfig(rule="top_k"))
    text = write(write_run(tmp_path / "run", pruning=biased)).text
    assert "completions by top_k (keep auto), biased: it drops the lowest |A|" in text


@pytest.mark.drawn
def test_page_requests_nothing(tmp_path: Path) -> None:
    text = render_page(read_runs([write_run(tmp_path / "run")]))
    shown = Elements(text)
    assert not shown.values("src")
    assert all(link.startswith(("#", "data:")) for link in shown.values("href"))
    assert not any(
        word in text for word in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttpRequest")
    )
    assert "default-src 'none'" in text


HOSTILE = (
    "</pre></article></main><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }} "
    "\" onload='x'"
)


@pytest.mark.drawn
def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    answers = [{"prompt": HOSTILE, "answer": HOSTILE, "label": HOSTILE, "correct": True}]
    shown = write(write_run(tmp_path / "<b onclick=alert(3)>", answers=answers))
    assert (shown.tags.count("script"), shown.tags.count("img")) == (1, 0)
    assert not shown.values("onclick")
    assert (
        shown.text.count(HOSTILE) == 2 + 4
    )  # the problem, its reference, and an answer of each evaluation


@pytest.mark.drawn
def test_run_without_measurements_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "pruning.jsonl", "answers.jsonl"):
        (run / name).write_text("")
    assert "no step is recorded yet" in write(run, write_run(tmp_path / "other")).text
    assert "No step has been timed yet." in write(run).text


@pytest.mark.parametrize("value", [float("nan"), "x", 10**400])
def test_value_without_a_number_is_left_out_alone(tmp_path: Path, value: object) -> None:
    run = write_run(tmp_path / "run")
    first, *rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spoilt = (
        "prune/noise_share_prompts", "prune/noise_share_completions", "prune/saved_tokens_prompts",
        "train/tokens",
        "perf/actor_train_time", "perf/step_time",
    )  # fmt: skip
    for row, key in zip(rows, spoilt, strict=True):
        row[key] = value
    further = rows[0] | {"step": value}, rows[0] | {"step": 7, "eval/accuracy": value}
    write_lines(run / "metrics.jsonl", [first, *rows, *further])
    report([run], tmp_path / "page.html", png=tmp_path / "png", price=2.0)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE)
    assert "25.0 → 75.0%" in text
    assert "6 steps of 2.00 s" in text  # the sixth is not timed, the seventh is


@pytest.mark.parametrize(
    "spoilt", ['"kept": null', '"kept": [3, NaN]', '"by_cause": [[1.0, null, 2, 1.0, 1]]']
)
def test_pruning_statistics_without_a_number_are_left_out(tmp_path: Path, spoilt: str) -> None:
    run = write_run(tmp_path / "run")
    line = (run / "pruning.jsonl").read_text().splitlines()[0].replace('"step": 1', '"step": 7')
    with (run / "pruning.jsonl").open("a") as file:
        file.write(f"{line[:-1]}, {spoilt}}}\n")
    assert [row["step"] for row in read_runs([run])[0].census] == [1, 2, 3, 4, 5, 6]
    assert "25.0 → 75.0%" in write(run).text


@pytest.mark.parametrize("answer", [{"answer": None}, {"label": 4}, {"correct": None}])
def test_incomplete_answer_is_left_out(tmp_path: Path, answer: dict[str, object]) -> None:
    whole = {"prompt": "2+2=", "answer": "#5", "label": "4", "correct": False}
    run = write_run(tmp_path / "run", answers=[whole | answer, whole])
    assert [len(row["answers"]) for row in read_runs([run])[0].answers] == [1] * 4
    assert "#5" in write(run).text


def test_torn_settings_are_the_defaults(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("run:\n  dir: x\n  steps:")
    assert "not at its end: step 6 of 100" in write(run).text


def test_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty.*is no folder of a run"):
        read_runs([write_run(tmp_path / "run"), tmp_path / "empty"])
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x.html")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_runs_have_distinct_names(tmp_path: Path) -> None:
    a, b, c, odd = (write_run(tmp_path / name) for name in ("a", "b", "c", "x=y"))
    runs = read_runs([Path(f"ours={a}"), Path(f"theirs={b}"), Path(f"theirs={c}"), odd])
    assert [(run.name, run.group, run.folder) for run in runs] == [
        ("ours", "ours", a), ("theirs: b", "theirs", b), ("theirs: c", "theirs", c), ("x=y", "",
        odd),
    ]  # fmt: skip
    same_name = read_runs([write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")])
    assert [run.name for run in same_name] == ["x/run", "y/run"]


def test_accuracies_of_data_sources_are_a_table(tmp_path: Path) -> None:
    held = {
        "eval/source/openai/gsm8k": 0.25,
        "eval/source/aime": 0.5,
        "eval/response_len/mean": 9.0,
    }
    rows = write(write_run(tmp_path / "run", held=held)).text
    assert "source/openai/gsm8k" in rows and "25.0 → 25.0%" in rows and "response_len" not in rows


def test_benchmarks_are_shown_with_intervals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    scores = {
        "model": "hf", "step": 60, "engine": "sglang", "samples": 8, "temperature": 1.0,
        "max_response_tokens": 64,
        "benchmarks": {
            "aime24": {
                "problems": 30, "avg@k": {"value": 0.25, "low": 0.15, "high": 0.4},
                "pass@k": {"1": {"value": 0.25}, "8": {"value": 0.5, "low": 0.3, "high": 0.7}},
                "majority": {"value": None, "low": None, "high": None},
                "mean_length": {"value": 1234.5},
                "mean_reward": {"value": 0.125, "low": -0.5, "high": 0.25},
                "truncated": float("nan"), "unscored": 2,
            }
        },
    }  # fmt: skip
    (run / "eval").mkdir()
    (run / "eval" / "scores.json").write_text(json.dumps(scores))
    (run / "torn").mkdir()
    (run / "torn" / "scores.json").write_text('{"benchmarks": {"aime')
    text = " ".join(write(run).text.split())
    assert (
        "aime24 30 25.0% (15.0–40.0) @8 50.0% (30.0–70.0) – 0.125 (-0.500–0.250) 1,234 – 2" in text
    )


def test_accuracy_has_an_interval_if_problems_are_counted(tmp_path: Path) -> None:
    several = write_run(
        tmp_path / "several", problems={"aime24": 30, "own": 50}, held={"eval/aime24": 0.5}
    )
    assert "aime24 50.0 → 50.0% (33.2–66.8)" in " ".join(write(several).text.split())
    assert "is the 95% interval" not in write(several).text  # of a mean over files there is none
    assert "is the 95% interval" not in write(write_run(tmp_path / "uncounted", problems={})).text


def test_partial_rewards_stand_beside_the_accuracy(tmp_path: Path) -> None:
    partial = write_run(tmp_path / "partial", held={"eval/reward": 0.5})
    assert "held-out reward 0.500 → 0.500" in " ".join(write(partial).text.split())
    assert "held-out reward" not in write(write_run(tmp_path / "whole")).text


def test_long_answers_keep_their_end(tmp_path: Path) -> None:
    answers = [
        {
            "prompt": "p",
            "answer": "a" * 500 + "x" * 5000 + "the end",
            "label": "l",
            "correct": False,
        }
    ]
    shown = write(write_run(tmp_path / "run", answers=answers))
    assert "[… 4,307 characters …]" in shown.text
    assert "the end" in shown.text
    assert "x" * 1000 not in shown.text


@pytest.mark.drawn
def test_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(11, 10_001):
            file.write(
                json.dumps(
                    rows[-1] | {"step": step, "rollout/raw_reward": (step * 7919 % 1000) / 1000}
                )
                + "\n"
            )
    assert len(render_page(read_runs([run]))) < 1_000_000


def test_command_writes_page_and_pictures_without_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    words = [
        "report",
        str(run),
        "--out",
        str(tmp_path / "new" / "page.html"),
        "--png",
        str(tmp_path / "png"),
    ]
    check = f"assert main({words}) == 0; assert 'torch' not in sys.modules"
    program = f"import sys; from megatron_dppo.cli import main; {check}"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert sorted(file.name for file in (tmp_path / "png").iterdir()) == [
        "run-progress.png",
        "run-pruning.png",
    ]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["page.html"]


def test_page_is_replaced_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    out.write_text("old")
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError))
    with pytest.raises(UserError, match="cannot be written"):
        report([run], out)
    assert out.read_text() == "old"


def test_changed_objective_is_shown(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("changed", "plain")]
    start = [f"run.dir={folders[0]}", "run.steps=6", "eval.problems=50"]
    record_settings(folders[0], 0, load_config(None, start))
    record_settings(
        folders[0],
        4,
        load_config(None, [*start, "loss.name=gspo", "optimizer.lr=1e-7", "run.resume=force"]),
    )
    text = " ".join(write(folders[0]).text.split())
    assert "after step setting before then 4 loss.name grpo gspo 4 optimizer.lr 1e-06 1e-07" in text
    race = " ".join(write(*folders).text.split())
    assert "changed during a run: changed, loss.name grpo until step 4, then gspo." in race
