"""What a reader looks for is on a page that two links lead to from the README."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import ROOT, text_of

LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)(?:#[^)\s]*)?\)")
ANSWERS = {
    "How much faster is it?": ("README.md", "1.19 and 1.22 times faster"),
    "On which platforms?": ("docs/faq.md", "WSL 2"),
    "How large is it, and how long does it take?": ("README.md", "1.5 GB"),
    "Which configuration is for one GPU?": ("docs/scaling.md", "qwen3_0.6b_1gpu"),
    "Does it run in a notebook?": ("docs/python.md", "notebook"),
    "What is my GRPOConfig called here?": ("docs/coming_from.md", "num_generations"),
    "How do I prune in TRL?": ("docs/recipes/other_trainers.md", "PrunedGRPOTrainer"),
    "Which learning rate, group size, lengths, KL?": ("docs/faq.md", "optimizer.lr"),
    "When is pruning not worth it?": ("docs/faq.md", "When does pruning not help?"),
    "What does a run with and without pruning look like?": ("README.md", "real_curves.png"),
    "How do I cite it?": ("README.md", "CITATION.cff"),
    "Is there an image?": ("docs/faq.md", "docker/Dockerfile"),
    "What is --rollout-batch-size called here?": ("docs/coming_from.md", "--rollout-batch-size"),
    "What is colocation called here?": ("docs/coming_from.md", "--colocate"),
    "How do I name servers without Slurm?": ("docs/rollout_servers.md", "MEGATRON_DPPO_SERVERS"),
    "Which process gets USR1?": ("docs/runs.md", "kill -USR1"),
    "Which settings may change when a run resumes?": ("docs/runs.md", "run.resume=anyway"),
    "How large is a checkpoint?": ("docs/faq.md", "How large is a checkpoint?"),
    "What is the throughput on GPUs?": ("docs/faq.md", "throughput"),
    "Is there FP8?": ("README.md", "no FP8"),
    "Kubernetes?": ("docs/faq.md", "Kubernetes"),
    "Qwen3.5, or Llama 3?": ("docs/faq.md", "Llama 2 and 3"),
    "Which script starts 14B?": ("README.md", "qwen3_14b_dppo.sh"),
    "Where do I report a fault?": ("docs/faq.md", "report a fault"),
    "What does a word mean?": ("docs/glossary.md", "staleness"),
}


def _within(links: int) -> set[str]:
    """The documents that so many links lead to from the README."""
    found = {"README.md"}
    for _ in range(links):
        found |= {_target(page, link) for page in found if page.endswith(".md") for link in LINK.findall(text_of(page))}
    return found


def _target(page: str, link: str) -> str:
    return str(((ROOT / page).parent / link).resolve().relative_to(ROOT))


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_two_links_from_the_readme(question: str) -> None:
    page, answer = ANSWERS[question]
    assert page in _within(2)
    assert answer in text_of(page)
