"""Hostile settings, files, model directories and rows are taken or refused in words, soon, and run
no code.

``FUZZ_CASES`` is the number of cases (default: 100), ``FUZZ_SEED`` the first one. A failing case is
named by its number and repeated by ``FUZZ_SEED=NUMBER FUZZ_CASES=1``.
"""

import json
import math
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import MistakesError, UserError
from megatron_dppo.settings import get_settings, load_config
from megatron_dppo.trainer.preflight import find_mistakes, prepare_data
from tests.policies import write_policy

CASES, FIRST = int(os.environ.get("FUZZ_CASES", "100")), int(os.environ.get("FUZZ_SEED", "0"))
LIMIT_S = 20
"""For one case; most take a hundredth of a second."""
VALUES = (
    "", "null", "yes", "-1", "1e308", "-1e308", ".inf", ".nan", "18446744073709551616", "9" * 400,
    "010",
    "1:30", "2001-01-01", "2001-12-14t21:59:43.10-05:00", "[]", "[[[]]]", "{}", "{1: 2}", "a\\nb",
    "\\0", "é", "\ud83d", "../..", "/dev/null", "/", "~", "a" * 5000,
    "!!python/object/apply:os.system [touch RAN]",
    "&a [*a]", "*a", "---", "? x", "%s", "${HOME}", "$(touch RAN)", "{{1}}", "http://[::1", "slurm",
    "[a: b", "'",
)  # fmt: skip
ODD = (
    None,
    True,
    0,
    -1,
    1e308,
    math.nan,
    "",
    "x" * 10_000,
    [],
    {},
    [[]],
    {"a": {"b": None}},
    "\ud83d",
    "\0",
    10**30,
)
YAMLS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "".join(f"key{i}: {i}\n" for i in range(rng.choice([20, 200]))),
    lambda rng: f"run: {{steps: {rng.choice(VALUES)}}}\n",
    lambda rng: f"run:\n  {rng.choice(VALUES)}: {rng.choice(VALUES)}\n",
    lambda rng: "[" * rng.choice([1, 50]),
    lambda rng: "{a: " * rng.choice([1, 50]) + "}" * rng.choice([0, 50]),
    lambda rng: "run: 2001-01-01\n2001-01-01: run\n? [a]\n: b\n",
    lambda rng: "\t- x\n\x01",
    lambda rng: "".join(chr(rng.randrange(1, 0x2FF)) for _ in range(200)),
)
HUGE = {
    "aliases": "a0: &a0 [x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
    "keys": "".join(f"key{i}: {i}\n" for i in range(20_000)),
    "lists": "[" * 20_000,
    "mappings": "{a: " * 5_000,
    "itself": "a: &a [*a]\n",
}
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ 1/0 }}", "{{ "
                                                                              "cycler.__init__.__globals__ }}",
)  # fmt: skip


class HangError(BaseException):
    """A case takes too long. Handlers of the code under test do not catch this error."""


@contextmanager
def limit_time() -> Iterator[None]:
    """Raise ``HangError`` in the block after ``LIMIT_S``."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_policy(folder / "hf", layers=1, hidden=16, heads=2, kv_heads=1, ffn=16)
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1), "id": i} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of(folder: Path) -> list[str]:
    settings = f"""
    model.path={folder / "hf"} data.train={folder / "rows.jsonl"} run.dir={folder / "run"} data.prompt_key=prompt
    data.label_key=label data.chat_template=false data.max_prompt_tokens=64 rollout.max_response_tokens=64
    eval.problems=0
    """
    return settings.split()


def of_settings(folder: Path, rng: random.Random) -> Config:
    """Some settings have hostile values."""
    keys = rng.sample([key for key in get_settings() if key != "run.dir"], rng.randint(1, 4))
    odd = [f"{key}={rng.choice(VALUES)}" for key in keys]
    return load_config(None, [*words_of(folder), *odd])


def of_yaml(folder: Path, rng: random.Random) -> Config:
    """A file is YAML that nobody writes."""
    (folder / "run.yaml").write_text(
        rng.choice(YAMLS)(rng), encoding="utf-8", errors="surrogatepass"
    )
    return load_config(str(folder / "run.yaml"), words_of(folder))


def of_model(folder: Path, rng: random.Random) -> Config:
    """A model's files are damaged, or lie."""
    hf, words = folder / "hf", words_of(folder)
    way = rng.randrange(3)
    if way == 0:
        config = json.loads((hf / "config.json").read_text())
        key = rng.choice(
            [*config, "rope_theta", "rope_parameters", "model_type", "num_hidden_layers"]
        )
        config[key] = rng.choice(
            [*ODD[:-1], 10**6, 10**12, "llama", ["Qwen3ForCausalLM"] * 2, {"rope_theta": 0}]
        )
        (hf / "config.json").write_text(json.dumps(config))
    elif way == 1:
        name = rng.choice(
            ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        )
        content = bytearray((hf / name).read_bytes())
        for _ in range(rng.choice([1, 1, 50])):
            content[rng.randrange(min(len(content), 4096))] = rng.randrange(256)
        (hf / name).write_bytes(
            content[: rng.choice([len(content), len(content), len(content) // 2, 0])]
        )
    else:
        (hf / "chat_template.jinja").write_text(
            rng.choice(TEMPLATES[2:] if rng.random() < 0.9 else TEMPLATES)
        )
        words.append("data.chat_template=true")
    return load_config(None, words)


def of_rows(folder: Path, rng: random.Random) -> Config:
    """A row is of another type, cut short, or no row."""
    *lines, last = (folder / "rows.jsonl").read_text().splitlines()
    key = rng.choice(["prompt", "label", "id", "extra_info", "reward_model", "data_source"])
    row = json.loads(last) | {key: rng.choice(ODD)}
    content = "\n".join([*lines, json.dumps(rng.choice([row, row, row, rng.choice(ODD)]))]).encode()
    if rng.random() < 0.3:
        content = content[: rng.randrange(len(content))] + rng.choice(
            [b"", b"\xff\xfe", b"\x00" * 9, b"[" * 30_000]
        )
    (folder / "rows.jsonl").write_bytes(content)
    return load_config(None, words_of(folder))


KINDS = (of_settings, of_yaml, of_model, of_rows)


def find_fault(number: int, whole: Path, folder: Path) -> str:
    """Return how a case ends wrongly; empty if the case is taken, or refused in words."""
    rng = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    shutil.copytree(whole, folder)
    try:
        with limit_time():
            config = kind(folder, rng)
            if not (found := [*find_mistakes(config, "train")]):
                prepare_data(config, "train")
            assert all(
                str(each).isprintable() or "\n" in str(each) or "\t" in str(each) for each in found
            )
    except (UserError, MistakesError):
        pass
    except HangError:
        return f"{number} {kind.__name__}: hangs"
    except BaseException:
        return f"{number} {kind.__name__}:\n{traceback.format_exc(limit=-3)}"
    finally:
        shutil.rmtree(folder)
    return ""


@pytest.mark.parametrize("kind", HUGE)
def test_huge_yaml_is_refused_soon(kind: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(HUGE[kind])
    with limit_time(), pytest.raises((UserError, MistakesError)):
        load_config(str(tmp_path / "run.yaml"), [])


@pytest.mark.quick
def test_hostile_input_is_taken_or_refused_in_words(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = range(FIRST, FIRST + CASES)
    wrong = [fault for number in cases if (fault := find_fault(number, whole, tmp_path / "case"))]
    assert not (tmp_path / "RAN").exists(), "code was run"
    assert not wrong, f"{len(wrong)} of {CASES} cases:\n" + "\n".join(wrong[:20])
