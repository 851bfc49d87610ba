"""Models and data sets of the Hugging Face hub, by id: found in the hub's own cache, or fetched
into it.

    policy_folder("Qwen/Qwen3-0.6B")
    data_files("openai/gsm8k:main:test", "data.eval", split="test")

Cached files are used as they are, without a search for a newer version: a run that resumes finds
the files that it began with. The hub's client locks each file that it fetches, so that one of a
machine's ranks fetches it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_dppo.errors import UserError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OF_A_POLICY = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model")
"""Files of a model that are read here. Others hold the same weights in another form."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
EXPORT = "hf"
"""Where a run has the policy that it has trained."""
Kind = Literal["model", "dataset"]


def is_id(name: str) -> bool:
    """Whether this may be an id of the hub. What is here, or would lie in a folder that is here, is
    no id, nor is the name of a file of data."""
    return (
        not name.endswith(DATA_SUFFIXES)
        and bool(ID.fullmatch(name.partition(":")[0]))
        and not Path(name).exists()
        and not Path(name).parent.exists()
    )


def policy_folder(path: str, setting: str = "model.path", *, weights: bool = True) -> Path:
    """The folder of a policy: the one that is named, or the one that a run's folder has its policy
    in, or what the hub publishes under this id.

    Args:
        path: that a setting or an option holds.
        setting: its name.
        weights: whether they are wanted, besides its shape and its tokenizer.

    Raises:
        UserError: if none is named, or none can have this name, and for an id of the hub that is
            neither in its cache nor can be fetched.
    """
    remedy = "Name a directory that holds a model, or the id of one on the Hugging Face hub"
    if not path:
        raise UserError(setting, "(empty)", "no policy is given", remedy)
    folder = Path(path)
    try:
        if (folder / EXPORT / "config.json").is_file() and not (folder / "config.json").is_file():
            return folder / EXPORT
    except OSError as error:  # its name is too long
        raise UserError(setting, path, f"is no directory ({error.strerror})", remedy) from error
    if not is_id(path):
        return folder  # its reader says what is missing there
    found = _find_cached(path, "model")
    if found is None or not _is_whole(found, weights=weights):
        found = _fetch(path, "model", setting, OF_A_POLICY if weights else OF_A_POLICY[1:])
        if not _is_whole(found, weights=weights):
            raise _build_fetch_error(
                path, "model", setting, "no config.json or not all of its safetensors came"
            )
    return found


def data_files(name: str, setting: str, *, split: str) -> list[Path]:
    """The files of a data set of the hub, ``ID``, ``ID:CONFIGURATION`` or
    ``ID:CONFIGURATION:SPLIT``, in their order.

    Args:
        name: with an empty configuration the only one.
        setting: that holds it.
        split: where the name has none.

    Raises:
        UserError: as ``policy_folder``; and for a configuration or split that the data set does not
            have.
    """
    repo, _, rest = name.partition(":")
    configuration, _, named = rest.partition(":")
    wanted = configuration, named or split
    folder = _find_cached(repo, "dataset")
    if folder is not None:
        files = _select_files(_list_names(folder), _read_readme(folder), name, setting, *wanted)
        if _are_all(files):
            return [folder / file for file in files]
    _fetch(repo, "dataset", setting, ("README.md",))  # which says what there is
    listed = _list_files(repo, setting)
    readme = _read_readme(_find_cached(repo, "dataset"))
    files = _select_files(listed, readme, name, setting, *wanted)
    if not files:
        raise _build_split_error(name, setting, wanted[1], listed)
    folder = _fetch(repo, "dataset", setting, tuple(files))
    if not all((folder / file).is_file() for file in files):
        raise _build_fetch_error(repo, "dataset", setting, "the download is incomplete")
    return [folder / file for file in files]


def _find_cached(repo: str, kind: Kind) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, repo_type=kind, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _fetch(repo: str, kind: Kind, setting: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:  # the client would return what there is, whole or not
        raise _build_fetch_error(repo, kind, setting, "HF_HUB_OFFLINE is set")
    try:
        return Path(snapshot_download(repo, repo_type=kind, allow_patterns=list(patterns)))
    except (
        Exception
    ) as error:  # of the connection, of the hub, of the disk: each library has its own
        raise _build_fetch_error(repo, kind, setting, error) from error


def _list_files(repo: str, setting: str) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return sorted(HfApi().list_repo_files(repo, repo_type="dataset"))
    except Exception as error:
        raise _build_fetch_error(repo, "dataset", setting, error) from error


def _build_fetch_error(repo: str, kind: Kind, setting: str, reason: Exception | str) -> UserError:
    from huggingface_hub import constants

    reason = next(iter(str(reason).splitlines()), type(reason).__name__)
    kind_of_path = "folder" if kind == "model" else "file"
    problem = (
        f"is no {kind_of_path} here, is incomplete in the hub's cache ({constants.HF_HUB_CACHE}), "
        "and "
        "was not fetched"
    )
    option = " --repo-type dataset" if kind == "dataset" else ""
    fetch = f"hf download {repo}{option}"
    if (
        kind == "model"
        and (published := Path(repo).name).startswith("Qwen")
        and not repo.startswith("Qwen/")
    ):
        # A folder, as the shipped configurations name it.
        fetch = f"hf download Qwen/{published} --local-dir {repo}"
    remedy = (
        f"Fetch it where there is a network, with `{fetch}`, or name a {kind_of_path} that is here"
    )
    return UserError(setting, repo, f"{problem}: {reason}", remedy)


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether a download came to its end, as far as its files say."""
    if not (folder / "config.json").is_file() or not weights:
        return (folder / "config.json").is_file()
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / shard).is_file() for shard in shards)


def _are_all(files: Sequence[str]) -> bool:
    """Whether there are as many as their names say: ``train-00000-of-00002.parquet``."""
    sets = Counter(re.sub(r"\d+(?=-of-\d+\.)", "", file) for file in files)
    wanted = {name: int(found[1]) for name in sets if (found := re.search(r"-of-(\d+)\.", name))}
    return bool(files) and all(sets[name] == count for name, count in wanted.items())


def _list_names(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )


def _read_readme(folder: Path | None) -> Mapping[str, Any]:
    """Metadata at the head of a data set's README."""
    file = folder and folder / "README.md"
    if not file or not file.is_file():
        return {}
    found = re.match(r"---\s*\n(.*?)\n---", file.read_text(encoding="utf-8"), re.DOTALL)
    declared = yaml.safe_load(found[1]) if found else None
    return declared if isinstance(declared, dict) else {}


def _select_files(
    files: Sequence[str],
    readme: Mapping[str, Any],
    name: str,
    setting: str,
    configuration: str,
    split: str,
) -> list[str]:
    """The files of one split: those that the data set's page declares, else those that are called
    so."""
    files = [file for file in files if file.endswith(DATA_SUFFIXES)]
    declared = {
        str(each["config_name"]): each
        for each in readme.get("configs") or ()
        if "data_files" in each
    }
    if declared:
        patterns = _list_patterns(
            declared[_select_configuration(list(declared), name, setting, configuration)][
                "data_files"
            ],
            split,
        )
        return [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
    called = [file for file in files if re.search(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)", file)]
    if (
        not called
        and split == "train"
        and not any(word in file for word in SPLITS for file in files)
    ):
        called = files
    folders = sorted({file.partition("/")[0] for file in called if "/" in file} - {"data", split})
    if not folders:
        return called
    folder = _select_configuration(folders, name, setting, configuration)
    return [file for file in called if file.startswith(f"{folder}/")]


def _select_configuration(names: list[str], name: str, setting: str, requested: str) -> str:
    if requested in names:
        return requested
    if not requested and (len(names) == 1 or "default" in names):
        return "default" if "default" in names else names[0]
    repo = name.partition(":")[0]
    problem = f"has no configuration {requested!r}" if requested else "has several configurations"
    raise UserError(setting, name, problem, f"Name one of {', '.join(names)}, as {repo}:{names[0]}")


def _list_patterns(data_files: Any, split: str) -> list[str]:
    """The patterns of a split's files. What names no split is ``train``."""
    if isinstance(data_files, str):
        data_files = [data_files]
    patterns: list[str] = []
    for each in data_files:
        found, path = (
            (each.get("split", "train"), each["path"])
            if isinstance(each, dict)
            else ("train", each)
        )
        if found == split:
            patterns += [path] if isinstance(path, str) else path
    return patterns


def _build_split_error(name: str, setting: str, split: str, files: Sequence[str]) -> UserError:
    shown = ", ".join(file for file in files if file.endswith(DATA_SUFFIXES))
    problem = (
        f"has no files of the split {split!r} in JSONL or parquet (it has {shown[:200] or 'none'})"
    )
    return UserError(
        setting, name, problem, f"Name another split: {name.partition(':')[0]}:CONFIGURATION:SPLIT"
    )
