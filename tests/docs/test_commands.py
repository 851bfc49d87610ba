"""Every command that the documentation shows is run, one page after the other, as its readers would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import all_commands
from tests.docs.sandbox import Sandbox
from tests.docs.ways import WAYS, is_run_elsewhere, typed_in, way_of

MAIN = typed_in("main")


@pytest.mark.parametrize("document", MAIN)
def test_the_commands_of_a_page_work_in_their_order(document: str, quickstart: Path, tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, document, quickstart)
    for command in MAIN[document]:
        sandbox.type(command)


def test_there_is_a_way_to_run_every_command() -> None:
    assert [f"{c.document}: {c.text}" for c in all_commands() if way_of(c) is None] == []


def test_no_way_is_left_over() -> None:
    used = {way.commands for command in all_commands() if (way := way_of(command))}
    assert {way.commands for way in WAYS} - used == set()


def test_what_is_run_elsewhere_is_run_there() -> None:
    assert [way.commands for way in WAYS if way.suite == "elsewhere" and not is_run_elsewhere(way)] == []


def test_every_page_with_commands_is_read() -> None:
    """The extractor is not blind: what a page shows between fences and in its prose is found."""
    found = {command.text for command in all_commands()}
    assert {
        "bash scripts/quickstart.sh",
        "megatron-dppo plan CONFIG",
        "python tools/convert_ckpt/hf_to_megatron.py runs/llama runs/llama_megatron --verify",
        "sbatch --ntasks-per-node=8 scripts/slurm/qwen3_4b_dppo.sh rollout.colocated=true rollout.launch.count=8 "
        "rollout.ahead=0 rollout.sync.transport=disk rollout.sync.folder=/dev/shm/megatron_dppo "
        "rollout.launch.flags=[--mem-fraction-static=0.7]",
    } <= found
