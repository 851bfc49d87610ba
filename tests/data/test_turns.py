"""What an environment says becomes the token ids that the chat template has there; no token of the policy changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import Again, NothingLeftError, OtherAnswerError, Turns, TurnsError
from megatron_dppo.init import CHAT_TEMPLATE, character_tokenizer, write_tokenizer

ASKED = [{"role": "system", "content": "a game"}, {"role": "user", "content": "guess"}]
MORE = {"role": "user", "content": "more"}
WITHOUT_THOUGHTS = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'] if message['role'] != 'assistant' or loop.last else message['content'].split('=')[-1])",
)
"""As Qwen3's: of earlier turns of the policy it leaves out what stands before the answer."""
OF_LAST = CHAT_TEMPLATE.replace(
    "message['content']", "(messages[0]['content'] if loop.last else '') + message['content']"
)
"""The last message begins with the system's."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    return load_tokenizer(tmp_path)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def told(tokenizer: Any, said: list[int], *rounds: list[dict[str, Any]]) -> list[list[int]]:
    """What the policy is told before each of its turns, all of which are ``said``."""
    heard: list[list[int]] = []

    async def say(told: list[int]) -> list[int]:
        heard.append(told)
        return said

    async def converse() -> None:
        turns = Turns(tokenizer, ASKED, say)
        for messages in rounds:
            await turns(messages)

    asyncio.run(converse())
    return heard


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITHOUT_THOUGHTS], ids=["ChatML", "without thoughts"])
def test_the_policy_is_told_what_the_template_puts_after_its_turn(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    said = [*tokenizer.encode("1+1=2"), tokenizer.eos_token_id]
    second = [*ASKED, assistant("1+1=2"), MORE]
    first, then, last = told(tokenizer, said, ASKED, second, [*second, assistant("1+1=2"), MORE, MORE])
    assert first == []
    assert tokenizer.decode(then) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(last).count("more") == 2, "and nothing of the turns before"
    whole = tokenizer.apply_chat_template(second, add_generation_prompt=True, tokenize=False)
    asked = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    if template is CHAT_TEMPLATE:
        assert asked + tokenizer.decode([*said, *then]) == whole


def test_a_turn_that_the_policy_did_not_close_is_closed_for_it(tokenizer: Any) -> None:
    (_, then) = told(tokenizer, tokenizer.encode("7"), ASKED, [*ASKED, assistant("7"), MORE])
    assert then[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "rounds", "words"),
    [
        (OF_LAST, [ASKED, [*ASKED, assistant("7"), MORE]], r"\(user\) for which the chat template changes what stands"),
        ("{{ raise_exception('no') }}", [ASKED, [*ASKED, assistant("7"), MORE]], r"fail in the chat template \(no\)"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            [ASKED, [*ASKED, assistant("7"), MORE]],
            "the chat template",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            [ASKED, [*ASKED, assistant("7")]],
            "with nothing between",
        ),
        (CHAT_TEMPLATE, [[MORE]], "other messages at first than its problem has"),
        (CHAT_TEMPLATE, [ASKED, [*ASKED, assistant("8"), MORE]], "about other messages than the conversation has"),
        (CHAT_TEMPLATE, [ASKED, [MORE]], "about other messages than the conversation has"),
        (CHAT_TEMPLATE, [ASKED, [*ASKED, assistant("7"), {"role": "user", "content": [MORE]}]], "with more than text"),
    ],
)
def test_what_cannot_stand_after_the_policys_tokens_is_refused(
    tokenizer: Any, template: str, rounds: list[Any], words: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TurnsError, match=words):
        told(tokenizer, tokenizer.encode("7"), *rounds)


def heard_again(told: list[list[int]], *, cut_off: bool = False) -> list[list[int]]:
    """What the policy says again of 1 2 | 5 5 | 3 | 6, to an environment that tells it this."""
    again = Again([1, 2, 5, 5, 3, 6], [True, True, False, False, True, False], cut_off=cut_off)

    async def hear() -> list[list[int]]:
        said = [await again(each) for each in told]
        again.check_end()
        return said

    return asyncio.run(hear())


def test_the_policy_says_again_what_it_said_to_an_environment_that_answers_the_same() -> None:
    with pytest.raises(NothingLeftError):
        heard_again([[], [5, 5], [6, 7]], cut_off=True)  # of which the 7 did not fit
    for other, cut_off, did in (
        ([[], [5, 4]], False, "answered"),
        ([[], [5]], True, "answered"),
        ([[], [5, 5, 6]], True, "answered"),
        ([[], [5, 5], [6]], False, "went on"),
        ([[], [5, 5], [7]], True, "answered"),
        ([[], [5, 5]], False, "ended"),
        ([[]], True, "ended"),
    ):
        with pytest.raises(OtherAnswerError, match=f"The environment {did}, otherwise than when"):
            heard_again(other, cut_off=cut_off)
