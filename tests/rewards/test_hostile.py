"""What a policy may write to fool or to halt the verifier costs no more than the time limit, and earns nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.math.verdict import judge
from megatron_dppo.rewards.workers import RewardWorkers

LIMIT_S = 2.0
MEBIBYTE = 2**20
LABELS = ("5", r"\frac{\sqrt{3} x}{2} + 1")


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


AT_ONCE = {
    "tower of powers": boxed("9^{9^{9}}"),
    "tower without braces": boxed("9^9^9^9"),
    "tower of tens": boxed("10^{10^{10}}"),
    "thirty powers": boxed("9^{" * 30 + "9" + "}" * 30),
    "tower that is not marked": "the answer is 9**9**9**9",
    "power of a power": boxed("(9999^{9999})^{9999}"),
    "power of a factorial": boxed("2^{20!}"),
    "factorials": boxed("(((9!)!)!)!"),
    "large factorial": boxed("99999999!"),
    "exponent of nine digits": boxed("1e999999999"),
    "ten thousand braces": boxed("{" * 10_000 + "5" + "}" * 10_000),
    "ten thousand brackets": boxed("(" * 10_000 + "5" + ")" * 10_000),
    "ten thousand open boxes": r"\boxed{" * 10_000,
    "three hundred fractions": boxed(r"\frac{1}{1+" * 300 + "1" + "}" * 300),
    "four hundred open texts": boxed(r"\text{" * 400),
    "backslashes": boxed("\\" * 900),
    "dollars": "$" * 5_000_000,
    "letters": "a" * 5_000_000,
    "digits": "9" * 5_000_000,
    "spaces between number signs": "#" + " " * 1_000_000 + "x#",
    "half a million headings": "# 1\n" * 500_000,
    "half a million times the answer is": "answer is " * 500_000,
    "plus-minus signs": boxed(r"\pm 1" * 100),
    "commas": boxed("," * 900),
    "nought through nought": boxed(r"\frac{0}{0}"),
    "combining marks": boxed("5" + "\u0301" * 900),
    "nul": boxed("\0"),
    "other digits": boxed("\u0665"),
    "Cyrillic letters": boxed("\u0445"),
    "sum of a hundred million": boxed(r"\sum_{k=1}^{100000000} \frac{1}{k}"),
    "binomial coefficient": boxed(r"\binom{10000000}{5000000}"),
    "gamma function": boxed(r"\Gamma(10^{9})"),
    "power of a polynomial": boxed("(x+y+z+w+a+b)^{99}"),
    "eighty powers of a sum": boxed("(x+1)^{999}" * 80),
    "hundred factorials": boxed("2999!" * 100),
    "factorials of an unknown": boxed("x!" * 480),
    "tower of an unknown": boxed("x^{x^{x^{x^{x^{x}}}}}"),
    "terms of unlike sizes": boxed("+".join(f"e^{{-{i}00}}" for i in range(1, 90))),
    "large powers": boxed("+".join(["99999^{7999}"] * 70)),
    "sine of a large number": boxed(r"\sin(10^{60})" * 60),
    "twenty sines": boxed(r"\sin(" * 20 + "x" + ")" * 20),
    "sixty intervals": boxed(r"[0,1]\cup " * 60 + "[0,1]"),
    "sets within sets": boxed(r"x\in " * 180),
    "names in a row": boxed("a b " * 240 + "=!5"),
    "endless code": "```python\nwhile True: pass\n```",
}


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardWorkers]:
    pool = RewardWorkers("math", workers=1, timeout_s=LIMIT_S)
    pool.wait_ready()
    yield pool
    pool.close()


@pytest.mark.parametrize("name", AT_ONCE)
def test_answer_that_is_not_worth_reading_is_wrong_before_its_time_is_over(workers: RewardWorkers, name: str) -> None:
    workers.wait_ready()
    scored = workers.score([ScoreItem("", AT_ONCE[name], label) for label in LABELS])
    assert (scored.timeouts, scored.errors) == (0, 0), scored.tracebacks
    assert [score and score.reward for score in scored.scores] == [0.0, 0.0]
    (scorer,) = psutil.Process(workers._workers[0].process.pid).children()
    assert scorer.memory_info().rss < 512 * MEBIBYTE


@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path('{mark}').touch()",
        "(lambda: open('{mark}', 'w'))()",
        "exec(open('{mark}', 'w'))",
        r"\text{{__import__('pathlib').Path('{mark}').touch()}}",
        "eval(compile(open('{mark}', 'w'), '', 'exec'))",
    ],
)
def test_code_is_never_run(tmp_path: Path, code: str) -> None:
    mark = tmp_path / "mark"
    for text in (code.format(mark=mark), "5" + code.format(mark=mark)):
        assert not judge("5", text).right
        assert not judge(r"\sqrt{5}", f"${text}$").right
    assert not mark.exists()


def test_long_answer_is_right_only_letter_by_letter() -> None:
    long = "+".join("x" * 600)
    assert judge(long, f" {long} ").right
    assert not judge("600x", long).right
