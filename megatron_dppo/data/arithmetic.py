"""A finite pool of sums with worked answers: the task that a policy of a million parameters learns in minutes.

12+7+55=        the question
12+7=19         one line per addition, so that the length of an answer varies with the problem
19+55=74
#74             the label
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.errors import UserError


@dataclass(frozen=True, slots=True)
class Sum:
    """One problem."""

    terms: tuple[int, ...]
    slips: tuple[bool, ...]
    """[terms − 1], whether the worked answer forgets the carry of that addition, if it has one."""
    short: bool = False
    """Whether the worked answer is the result alone."""

    @property
    def question(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def label(self) -> str:
        return str(sum(self.terms))

    @property
    def worked_answer(self) -> str:
        """One line per addition, then the result; wrong from the first forgotten carry on. Or the label at once."""
        if self.short:
            return f"#{self.label}"
        lines, total = [], self.terms[0]
        for term, slip in zip(self.terms[1:], self.slips, strict=True):
            carries = total % 10 + term % 10 >= 10
            after = total + term - (10 if carries and slip else 0)
            lines.append(f"{total}+{term}={after}")
            total = after
        return "\n".join([*lines, f"#{total}"])


def make_sums(config: ArithmeticConfig) -> tuple[list[Sum], list[Sum]]:
    """The training pool and the held-out problems. No question occurs twice in the two together.

    Held-out problems are drawn first, so that they stay the same, and unseen, for every size of the training pool: a
    supervised warm-up may take a larger pool than the training that follows it.

    Raises:
        UserError: if there are fewer distinct problems than asked for.
    """
    lengths = range(config.min_terms, config.max_terms + 1)
    if not lengths:
        raise UserError(
            "data.arithmetic.min_terms",
            config.min_terms,
            f"is more than data.arithmetic.max_terms = {config.max_terms}",
            "Lower it, or raise max_terms",
        )
    wanted = config.problems + config.eval_problems
    left = {length: config.max_operand**length for length in lengths}
    if sum(left.values()) < wanted:
        raise UserError(
            "data.arithmetic.problems",
            config.problems,
            f"with {config.eval_problems} held-out ones more than the {sum(left.values())} distinct sums of "
            f"{config.min_terms} to {config.max_terms} numbers up to {config.max_operand}",
            "Lower problems or eval_problems, or raise max_operand or max_terms",
        )
    draw = random.Random(config.seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < wanted:
        # Every number of terms is as likely as another while its sums last: short ones are soon used up.
        length = draw.choice([length for length in lengths if left[length]])
        terms = tuple(draw.randint(1, config.max_operand) for _ in range(length))
        if terms not in drawn:
            drawn[terms] = None
            left[length] -= 1
    teacher, style = random.Random(config.seed + 1), random.Random(config.seed + 2)
    sums = [
        Sum(
            terms,
            slips=tuple(teacher.random() < config.forgotten_carries for _ in terms[1:]),
            short=style.random() < config.short_answers,
        )
        for terms in drawn
    ]
    return sums[config.eval_problems :], sums[: config.eval_problems]
