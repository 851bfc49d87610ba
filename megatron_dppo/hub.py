"""Models and data sets of the Hugging Face hub by id, from the hub's cache or downloaded there.

    policy_folder("Qwen/Qwen3-0.6B")
    data_files("openai/gsm8k:main:test", "data.eval", split="test")

Cached files are never updated: a resumed run finds its original files. The hub's client locks
downloads: a single rank of a machine fetches a file.
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
"""Model files read here. Further files repeat the weights."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
EXPORT = "hf"
"""Subfolder of a run's policy."""
Kind = Literal["model", "dataset"]


def is_id(name: str) -> bool:
    """Return whether ``name`` may be a hub id, and not a path."""
    # A missing file in an existing folder is a path with a mistake.
    return (
        not name.endswith(DATA_SUFFIXES)
        and bool(ID.fullmatch(name.partition(":")[0]))
        and not Path(name).exists()
        and not Path(name).parent.exists()
    )


def policy_folder(path: str, setting: str = "model.path", *, weights: bool = True) -> Path:
    """Return the folder of a policy: the named folder, a run's export, or a hub id's files.

    Args:
        setting: name of the setting, for errors.
        weights: False if shape and tokenizer suffice.

    Raises:
        UserError: if ``path`` is empty or no name, or a hub id is not cached and cannot be fetched.
    """
    remedy = "Name a directory that holds a model, or the id of one on the Hugging Face hub"
    if not path:
        raise UserError(setting, "(empty)", "no policy is given", remedy)
    folder = Path(path)
    try:
        if (folder / EXPORT / "config.json").is_file() and not (folder / "config.json").is_file():
            return folder / EXPORT
    # For example, the name is too long.
    except OSError as error:
        raise UserError(setting, path, f"is no directory ({error.strerror})", remedy) from error
    # The reader of the folder reports missing files.
    if not is_id(path):
        return folder
    found = _find_cached(path, "model")
    if found is None or not _is_whole(found, weights=weights):
        found = _fetch(path, "model", setting, OF_A_POLICY if weights else OF_A_POLICY[1:])
        if not _is_whole(found, weights=weights):
            raise _build_fetch_error(
                path, "model", setting, "no config.json or not all of its safetensors came"
            )
    return found


def data_files(name: str, setting: str, *, split: str) -> list[Path]:
    """Return the ordered files of a hub data set ``ID[:CONFIGURATION[:SPLIT]]``.

    Args:
        name: data set; an empty configuration means the only one.
        setting: name of the setting, for errors.
        split: default split.

    Raises:
        UserError: see ``policy_folder``; also for an unknown configuration or split.
    """
    repo, _, rest = name.partition(":")
    configuration, _, named = rest.partition(":")
    wanted = configuration, named or split
    folder = _find_cached(repo, "dataset")
    if folder is not None:
        files = _select_files(_list_names(folder), _read_readme(folder), name, setting, *wanted)
        if _are_all(files):
            return [folder / file for file in files]
    # Fetch the README first: the README lists configurations and splits.
    _fetch(repo, "dataset", setting, ("README.md",))
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

    # Offline, the client would return partial downloads.
    if constants.HF_HUB_OFFLINE:
        raise _build_fetch_error(repo, kind, setting, "HF_HUB_OFFLINE is set")
    try:
        return Path(snapshot_download(repo, repo_type=kind, allow_patterns=list(patterns)))
    # Connection, hub and disk errors share no base class.
    except Exception as error:
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
        "and was not fetched"
    )
    option = " --repo-type dataset" if kind == "dataset" else ""
    fetch = f"hf download {repo}{option}"
    published = Path(repo).name
    if kind == "model" and published.startswith("Qwen") and not repo.startswith("Qwen/"):
        # The shipped configurations name a local folder, such as models/Qwen3-0.6B, which has the
        # form of a hub id: download the published model to this folder.
        fetch = f"hf download Qwen/{published} --local-dir {repo}"
    remedy = (
        f"Fetch it where there is a network, with `{fetch}`, or name a {kind_of_path} that is here"
    )
    return UserError(setting, repo, f"{problem}: {reason}", remedy)


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Return whether a model's download is complete, by file names."""
    if not (folder / "config.json").is_file() or not weights:
        return (folder / "config.json").is_file()
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / shard).is_file() for shard in shards)


def _are_all(files: Sequence[str]) -> bool:
    """Return whether all shards exist: ``train-00000-of-00002.parquet``."""
    sets = Counter(re.sub(r"\d+(?=-of-\d+\.)", "", file) for file in files)
    wanted = {name: int(found[1]) for name in sets if (found := re.search(r"-of-(\d+)\.", name))}
    return bool(files) and all(sets[name] == count for name, count in wanted.items())


def _list_names(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )


def _read_readme(folder: Path | None) -> Mapping[str, Any]:
    """Return the metadata of a data set's README."""
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
    """List a split's files, as declared by the README, else by name."""
    files = [file for file in files if file.endswith(DATA_SUFFIXES)]
    declared = {
        str(each["config_name"]): each
        for each in readme.get("configs") or ()
        if "data_files" in each
    }
    if declared:
        selected = _select_configuration(list(declared), name, setting, configuration)
        patterns = _list_patterns(declared[selected]["data_files"], split)
        matching = []
        for file in files:
            if any(fnmatch(file, pattern) for pattern in patterns):
                matching.append(file)
        return matching
    called = [file for file in files if re.search(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)", file)]
    # A data set without any split in the names is all training data.
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
    """List a split's patterns; entries without a split are ``train``."""
    if isinstance(data_files, str):
        data_files = [data_files]
    patterns: list[str] = []
    for each in data_files:
        if isinstance(each, dict):
            found, path = each.get("split", "train"), each["path"]
        else:
            found, path = "train", each
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
