import subprocess
import sys
from pathlib import Path

import megatron_dppo.rl

ROOT = Path(megatron_dppo.rl.__file__).parent


def loaded(module: str) -> set[str]:
    """Top-level packages in a fresh interpreter that has imported one module."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_planner_runs_without_torch_and_without_megatron():
    planner = "megatron_dppo.rl.plan, megatron_dppo.rl.pruning.prompt_rules"
    assert not {"torch", "megatron", "transformers"} & loaded(planner)


def test_only_the_losses_know_torch():
    naming = {path.name for path in ROOT.rglob("*.py") if "import torch" in path.read_text(encoding="utf-8")}
    assert naming == {"losses.py"}
    assert "megatron" not in loaded("megatron_dppo.rl.losses")
