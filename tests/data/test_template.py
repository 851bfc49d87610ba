"""A chat template is a program: one that never ends, or has no measure, is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.data.tokenizer import check_template
from megatron_dppo.errors import UserError

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOPS, "does not end within 5 s"),
        ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "makes more than 1,000,000 characters"),
        ("{{ 'a' * 10**10 }}", "takes more than 1024 MiB"),
    ],
)
def test_a_template_without_measure_is_refused(template: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError) as caught:
        check_template(tmp_path)
    assert caught.value.setting == "model.path" and problem in caught.value.problem


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'] }}", "{% generation %}", "{{ raise_exception('no') }}", "{{ 1/0 }}", "{% x"]
)
def test_what_is_wrong_otherwise_is_the_tokenizer_s_to_tell(template: str, tmp_path: Path) -> None:
    for content in (template, [{"name": "default", "template": template}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
        check_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    check_template(tmp_path)
