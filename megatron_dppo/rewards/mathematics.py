"""The verifier for mathematics: an answer is right if a declared equivalence makes it the label."""

from __future__ import annotations

from typing import Any

from megatron_dppo.rewards.stated import plain_number, said_answer, stated_answer, stated_boxes
from megatron_dppo.rewards.verdict import judge


def math_verdict(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    r"""``score``: 1 if the answer equals the label as mathematics, else 0; ``pred``: the answer; ``by``: why it is.

    The answer is what stands in the last ``\boxed{}`` (in all of them, where several are listed), else after the last
    ``####`` or ``#``, else what is said last (:func:`~megatron_dppo.rewards.stated.said_answer`). The label may be
    marked so too, or be the bare answer. There is no time limit in here: the process that this runs in is killed when
    its time is over.

    Raises:
        ValueError: if the label is empty: a fault of the data, not of the answer.
    """
    label = stated_answer(ground_truth) or ground_truth
    answer = stated_answer(solution_str)
    if answer is None:
        answer = said_answer(solution_str)
    numbers = plain_number(label), plain_number(answer)
    if numbers[0] is not None and numbers[1] is not None and numbers[0] == numbers[1]:
        # Spares the great majority of answers all that follows.
        return {"score": 1.0, "pred": answer, "by": () if label.strip() == answer.strip() else ("number",)}
    verdict = judge(label, answer)
    boxes = stated_boxes(solution_str)
    if not verdict.right and len(boxes) > 1:  # one answer in several forms
        forms = [judge(label, box) for box in boxes]
        verdict = forms[-1] if all(form.right for form in forms) else verdict
    return {"score": float(verdict.right), "pred": answer, "by": verdict.by}


# The first call builds grammars, which takes longer than many verdicts: not at the expense of the first completion.
judge(r"\sqrt{4}", r"2^{1}")
