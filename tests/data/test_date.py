"""A date in the chat template is that of the first start, for all ranks and on later days."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from datetime import date, datetime
from pathlib import Path

import pytest

from megatron_dppo.config import Config, DataConfig
from megatron_dppo.data.date import DATE, freeze_date, with_date
from megatron_dppo.data.tokenizer import NAMED_TEMPLATES, Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.eval import _evaluate
from megatron_dppo.evaluation.answers import resolve_out_folder
from megatron_dppo.parallel.world import initialize
from megatron_dppo.train import Trainer
from tests.data.conftest import Load
from tests.ranks import RankPool
from tests.small_runs import begin_run, small_run, write_run

DATED = """
{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% endif %}
Today Date: {{ today }}
{{ messages[0].content }}"""
"""As Llama 3.2's."""


@pytest.fixture
def dated(model: Path, tmp_path: Path) -> Path:
    """A policy's folder whose template prints the date."""
    folder = shutil.copytree(model, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text(DATED)
    return folder


def test_the_date_is_kept_in_the_folder(
    dated: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder, today = DataConfig(), tmp_path / "run", date.today().isoformat()
    assert with_date(data, dated, folder).date == today and not folder.exists()
    assert with_date(data, model, folder, keep=True) == data and not folder.exists()
    assert with_date(data, dated, folder, keep=True).date == today
    assert (
        folder / DATE
    ).read_text().strip() == today and f"always {today}" in capsys.readouterr().err
    (folder / DATE).write_text("2026-01-31\n")
    assert with_date(data, dated, folder, keep=True).date == "2026-01-31"
    assert with_date(DataConfig(date="2025-12-01"), dated, folder).date == "2025-12-01"
    (folder / DATE).write_text("31 January")
    with pytest.raises(UserError, match=r"data\.date.*prompt_date\.txt cannot hold"):
        with_date(data, dated, folder)


def test_prompts_have_the_date_that_is_set(dated: Path, load: Load) -> None:
    (prompt,) = load([{"prompt": "Hi", "label": "1"}], load_tokenizer(dated), date="2026-01-31")
    assert prompt.text == "Today Date: 31 Jan 2026\nHi"


@pytest.mark.parametrize(
    "format", ["%d %b %Y", "%Y-%m-%d", "%A, %-d %B %y at %H:%M (%%, %j)", "Today"]
)
def test_a_stopped_clock_changes_nothing_but_the_date(tokenizer: Tokenizer, format: str) -> None:
    day, chat = datetime.now().replace(hour=0, minute=0), [{"role": "user", "content": "Hi"}]
    template = f"\n{{{{ strftime_now('{format}') }}}} {{{{ messages[0].content }}}}\n"

    def render(template: str) -> object:
        return tokenizer.apply_chat_template(
            chat, chat_template=template, add_generation_prompt=True, tokenize=False
        )

    assert render(
        freeze_date(template, f"{day:%Y-%m-%d}")
    ) == f"\n{day.strftime(format)} Hi\n".removesuffix("\n")
    assert (
        render(freeze_date(template, "2024-02-29"))
        == f"\n{datetime(2024, 2, 29).strftime(format)} Hi"
    )


def test_the_date_is_found_in_named_templates(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "policy")
    (folder / NAMED_TEMPLATES).mkdir()
    (folder / NAMED_TEMPLATES / "tool_use.jinja").write_text(DATED)
    assert with_date(DataConfig(), folder, tmp_path).date


def train_and_evaluate(rank: int, size: int, config: Config) -> str:
    with ExitStack() as to_close:
        text = begin_run(config, Trainer, to_close).pool[0].text
    _evaluate(config, initialize(config.layout, seed=config.run.seed, timeout_s=60.0))
    return text


def test_a_later_start_has_the_date_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    folder, run = write_run(tmp_path / "policy"), tmp_path / "run"
    (folder / "hf" / "chat_template.jinja").write_text(DATED)
    limits = ["data.max_prompt_tokens=64", "eval.batch=4", "data.chat_template=true"]
    config = small_run(folder, run, *limits)
    for place in (run, resolve_out_folder(config)):
        place.mkdir(parents=True)
        (place / DATE).write_text("2026-01-31\n")
    for text in ranks.run(2, train_and_evaluate, config):
        assert text.startswith("Today Date: 31 Jan 2026\n")
    answers = (resolve_out_folder(config) / "answers.jsonl").read_text().splitlines()
    assert answers and all("31 Jan 2026" in json.loads(line)["prompt"] for line in answers)
