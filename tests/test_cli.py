"""Every command runs, refusals name a setting with exit code 2, and output goes to the right
stream."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_dppo import __version__
from megatron_dppo.cli import COMMANDS, main
from megatron_dppo.config import Config
from megatron_dppo.settings import as_yaml
from tests.commands import Command
from tests.small_runs import small_run, write_run

pytestmark = pytest.mark.xdist_group("test_cli")

HERE = Path(__file__).parent
RUNS = yaml.safe_load((HERE / "command_table.yaml").read_text())
REFUSALS = yaml.safe_load((HERE / "refusals.yaml").read_text())
FRESH = "small.yaml run.dir=new data.train=rows.jsonl eval.problems=0"
MINE = """
print("hello")

def trl(completions, level): ...
def with_default(completions, level=1, **columns): ...
def of_two(solution, truth): ...
def objective(tokens): return tokens.ratio
async def converse(client): ...
def one_for_all(candidates, keep): return keep
"""


def run_in(folder: Path, words: str, log: Path) -> str:
    """Run a command in a fork and return its output."""
    code = Command(["megatron-dppo", *shlex.split(words)], log, folder=folder).exit_code()
    assert code == 0, log.read_text()
    return log.read_text()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the two tables name."""
    root = write_run(tmp_path_factory.mktemp("cli"))
    (root / "small.yaml").write_text(
        as_yaml(small_run(root, root / "run", "run.steps=1", "eval.every=1"))
    )
    answers = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (root / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (root / "mine.py").write_text(MINE)
    shutil.copytree(root / "hf", root / "runs/quickstart/warm")
    for command in ("train small.yaml", f"sft {RUNS['sft'][0]}"):
        run_in(root, command, root / "log")
    return root


@pytest.mark.quick
@pytest.mark.parametrize("command", RUNS)
def test_every_command_runs(command: str, root: Path, tmp_path: Path) -> None:
    words, seen = RUNS[command]
    assert seen in run_in(root, f"{command} {words}", tmp_path / "log")


def test_every_command_is_listed_and_stands_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    alone = capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert (ended.value.code, capsys.readouterr().out) == (0, alone)
    shown = re.findall(r"^  ([a-z-]+(?: [a-z-]+)?)  +[A-Z].*\.$", alone, re.MULTILINE)
    assert shown == [command for commands in COMMANDS.values() for command in commands]
    assert {*shown} == {*RUNS, "serve"}
    assert len(shown) <= 16, "a reader finds a command at a glance"


def test_a_warm_up_prints_twenty_rows(root: Path, tmp_path: Path) -> None:
    words = f"sft small.yaml sft.steps=40 sft.batch=1 sft.out={tmp_path}/warm"
    shown = re.findall(r"(\d+)/40\b", run_in(root, words, tmp_path / "log"))
    assert [int(step) for step in shown] == [*range(2, 41, 2)]


def read_settings(text: str) -> list[str]:
    """Return the settings that the errors of a text are about."""
    return re.findall(r"^error: (\S+)(?: =| is empty)", text, re.MULTILINE)


@pytest.mark.parametrize("row", REFUSALS["commands"], ids=lambda row: row[0])
def test_a_refused_command_names_its_setting_and_writes_nothing(
    row: list[str],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, setting, fragment = (*(each.replace("ROOT", str(root)) for each in row), "")[:3]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(words.replace("configs/", f"{HERE.parent}/configs/"))) == 2
    said = capsys.readouterr()
    assert said.out == "" and read_settings(said.err) == [setting]
    assert fragment in " ".join(said.err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        "report {}",
        "eval small.yaml --model {}",
        "train small.yaml data.train={}",
        "train small.yaml reward.function={}.py:f",
    ],
)
def test_name_that_no_file_can_have_is_refused(
    words: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    assert main(words.format("a" * 256).split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and "is longer than the name of a file can be" in said.err


@pytest.mark.parametrize("row", REFUSALS["checks"], ids=lambda row: row[0])
def test_check_finds_what_does_not_fit_without_a_rank(
    row: list[str], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, setting, fragment = row
    monkeypatch.chdir(root)
    assert main(["train", *FRESH.split(), *overrides.split(), "--check"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and read_settings(said.err) == [setting]
    assert fragment in " ".join(said.err.replace("problem", "").split())


@pytest.mark.parametrize("words", ["--check 2 {}", "{} --check"])
def test_check_prints_progress_and_leaves_no_trace(
    words: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root)
    own = f"{FRESH} reward.function=mine.py:with_default run.dir={tmp_path}/run"
    assert main(["train", *words.format(own).split()]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/run: 0 of 1 steps are done\n"
    assert {*said.err.removesuffix("no mistake was found\n").split()} == {"hello"}, (
        "imports may print, but not results"
    )
    assert not (tmp_path / "run").exists()


def test_check_finds_all_mistakes_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def find(words: str) -> list[str]:
        assert main(["train", str(root / "small.yaml"), "run.dir=new", *words.split()]) == 2
        return read_settings(capsys.readouterr().err)

    wrong = "layout.tpp=2 run.seed=often run.steps=0 layout=2"
    assert (
        find(wrong) == find(f"{wrong} --check") == ["layout.tpp", "layout", "run.seed", "run.steps"]
    )
    apart = "layout.tp=3 data.train=nowhere.jsonl reward.function=nowhere:score optimizer.min_lr=2"
    clash = "rollout.engine=vllm pack.max_tokens=16 loss.objective=nowhere:objective"
    assert find(f"{apart} {clash} --check 4") == [
        "optimizer.min_lr",
        "pack.max_tokens",
        "rollout.engine",
        "layout.tp",
        "data.train",
        "reward.function",
        "loss.objective",
        "layout",
    ]
    servers = (
        "rollout.engine=sglang rollout.launch.count=1 rollout.launch.tp=3 "
        "rollout.launch.command=[/nowhere]"
    )
    found = find(f"{servers} data.train=nowhere.jsonl data.eval=nowhere.jsonl --check")
    assert found == ["rollout.launch.tp", "rollout.launch.command", "data.train", "data.eval"]


def test_check_of_a_slurm_job_passes_on_a_login_node(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    words = ["train", *FRESH.split(), "rollout.engine=sglang", "rollout.servers=slurm", "--check"]
    assert main([*words, "cluster.server_nodes=2"]) == 0
    assert "note: no Slurm job here: cluster.server_nodes = 2 is assumed" in capsys.readouterr().err
    assert main(words) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main([*words, "cluster.server_nodes=2"]) == 2
    assert read_settings(capsys.readouterr().err) == ["rollout.servers", "rollout.servers"]


def test_an_error_is_one_block_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "pruning.completions.kep=0.3"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: pruning.completions.kep = 0.3\n"
        "  problem  there is no such setting\n"
        "  remedy   Write pruning.completions.keep, if that was meant\n",
    )
    with pytest.raises(SystemExit) as ended:
        main(["init", "a", "--stpes", "3"])
    assert ended.value.code == 2
    assert "usage: megatron-dppo" in capsys.readouterr().err


def test_a_file_and_overrides_are_printed_together(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override may be longer than the name of a file."""
    words = [str(root / "small.yaml"), f"data.system={'long ' * 999}", "--print-config"]
    assert main(["train", *words]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["run"]["steps"], len(found["data"]["system"])) == (1, 4995)


ALONE = """
import sys
for package in ("torch", "megatron", "transformers"):
    sys.modules[package] = None
from megatron_dppo.cli import main
for words in (["--print-config"], ["model.path=nowhere"], ["pack.max_tokens=5"]):
    print(main(["train", *words]))
main(["--version"])
"""


def test_settings_are_answered_without_torch_or_megatron() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-4:]) == (
        0,
        ["0", "2", "2", f"megatron-dppo {__version__}"],
    )
    assert read_settings(done.stderr) == ["model.path", "pack.max_tokens"]


def test_ctrl_c_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(command: str, config: Config) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return 0

    monkeypatch.setattr("megatron_dppo.launch.start.run", interrupt)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == ""
