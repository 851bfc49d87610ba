"""Keys and passwords are left out of what is shown of settings; numbers and names stay."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.observe.private import has_secrets, mask_secrets


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        (
            "data.verifiers.arguments",
            {"a": {"b": "x", "c": 2}, "pin_key": 7},
            {"a": {"b": "…", "c": 2}, "pin_key": "…"},
        ),
        (
            "data.chat_template_kwargs",
            {"enable_thinking": False, "a": "x"},
            {"enable_thinking": False, "a": "…"},
        ),
        ("loss.distillation.teacher", "http://me:p@ss@host:3/v1", "http://***@host:3/v1"),
        ("loss.distillation.teachers", {"math": "https://me:x@host"}, {"math": "https://***@host"}),
        ("rollout.servers", ["http://me:x@a", "http://b"], ["http://***@a", "http://b"]),
        ("data.train", "https:/me:x@host/a.jsonl", "https:/***@host/a.jsonl"),
    ],
)
def test_secrets_of_settings_are_left_out(key: str, value: Any, shown: Any) -> None:
    assert mask_secrets(key, value) == shown
    assert has_secrets({key: value})
    assert not has_secrets({key: shown, "data.system": "Mail me@home: https://a/b@c"})
