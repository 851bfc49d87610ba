"""Store rows of large files with token ids, and read single rows from the disk.

- A store is a folder in the user's cache, named by a hash of the files' content, the tokenizer and
  the caller's settings.
- A single process tokenises; other processes wait.
- Rows are in an Arrow file. All ranks of a machine share the pages.
- A damaged store, by its checksum, is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.data.rows import BATCH, Row, parse_line, parse_record, read_batches
from megatron_dppo.data.tokenizer import NAMED_TEMPLATES
from megatron_dppo.errors import UserError
from megatron_dppo.process.files import file_digest, replace_directory
from megatron_dppo.process.streams import print_message, report_progress

# Smaller files are read into memory, in seconds.
LARGE = 16 * 2**20
"""Minimum bytes of stored files."""
STORED = (".jsonl", ".ndjson", ".parquet")
CACHE = "MEGATRON_DPPO_CACHE"
"""Environment variable with the cache folder; default: $XDG_CACHE_HOME/megatron_dppo or
~/.cache/megatron_dppo."""
FORM = 6
"""Version of the form. Other versions are stored again."""
CHAT_TEMPLATES = ("chat_template*", f"{NAMED_TEMPLATES}/*")
TOKENIZER_FILES = (
    "token*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
    *CHAT_TEMPLATES,
)
ROWS = "rows.arrow"
SUMMARY = "summary.json"
Columns = tuple[list[int], ...]
"""Token ids of a row: prompt, and worked answer on request."""
Encode = Callable[[list[Row]], list[tuple[int, Columns] | None]]
"""Function from rows to hashes of prompts with token ids; None leaves a row out. Raises UserError
for a wrong row."""


def are_large(files: Sequence[Path]) -> bool:
    known = all(file.suffix in STORED and file.is_file() for file in files)
    return known and sum(file.stat().st_size for file in files) >= LARGE


def cache_folder() -> Path:
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return Path(os.environ.get(CACHE) or user / "megatron_dppo") / "prompts"


class StoredRows:
    """N rows of files, with token ids. Dropped rows are not counted."""

    def __init__(self, folder: Path, files: Sequence[Path], setting: str) -> None:
        """
        Args:
            folder: folder made by :func:`store`.
            files: files of the rows, for errors.
            setting: setting of the files, for errors.
        """
        import pyarrow

        with pyarrow.memory_map(str(folder / ROWS)) as mapped:
            self._table = pyarrow.ipc.open_file(mapped).read_all()
        self._files = files
        self._setting = setting
        # Lines of JSONL are stored as bytes, rows of parquet as records.
        self._lines = pyarrow.types.is_large_binary(self._table.schema.field("values").type)
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        self.dropped = int(summary["dropped"])
        self.longest = int(summary["longest"])
        """Tokens of the longest row, in all columns."""
        self.data_sources = frozenset[str](summary["data_sources"])

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def keys(self) -> NDArray[np.int64]:
        """[N], hashes of the prompts."""
        return np.asarray(self._table["key"], np.int64)

    def get_row(self, index: int) -> Row:
        """Return a row, parsed again from the stored values."""
        file, number, values = (
            self._table[name][index].as_py() for name in ("file", "number", "values")
        )
        parse = parse_line if self._lines else parse_record
        return parse(values, number, self._files[file], self._setting)

    def get_tokens(self, index: int, column: int = 0) -> list[int]:
        """Return token ids: [P] of column 0, the prompt; [L] of column 1."""
        return list(self._table[f"tokens{column}"][index].values.to_pylist())


def store(
    files: Sequence[Path],
    setting: str,
    depends_on: Mapping[str, Any],
    tokenizer: Path,
    encode: Encode,
) -> StoredRows:
    """Return the rows of files with token ids; store the rows first if necessary.

    Args:
        files: files of the same kind.
        depends_on: settings that change the result, as JSON.
        tokenizer: folder.
        encode: encoder of a batch of rows; not called if all rows are stored.

    Raises:
        UserError: an error of ``read_rows`` or ``encode``; files differ in kind or columns; or the
            cache folder cannot be written.
    """
    try:
        contents = [(file.suffix, file_digest(file)) for file in files]
        known = [
            FORM,
            version("transformers"),
            contents,
            _hash_tokenizer(tokenizer),
            dict(depends_on),
        ]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        folder = cache_folder() / digest[:32]
        is_waiting = False
        while not _is_whole(folder):
            try:
                with replace_directory(folder) as draft:
                    # Discard the draft if another process was faster.
                    if _is_whole(folder):
                        raise FileExistsError
                    if folder.exists():
                        print_message(f"note: {folder} is damaged, and is made again")
                    _write(draft, files, setting, encode)
            # Another process writes the store, or has finished.
            except FileExistsError:
                if not is_waiting:
                    print_message(f"waiting for another process that tokenises {files[0]}")
                is_waiting = True
                time.sleep(0.2)
        return StoredRows(folder, files, setting)
    except OSError as error:
        if error.filename in map(str, files):
            raise UserError(
                setting, error.filename, f"cannot be read ({error.strerror})", "Make it readable"
            ) from error
        problem = f"cannot keep what is made of {files[0]} ({error.strerror or error})"
        remedy = f"Free some room there, or name another folder in the environment variable {CACHE}"
        raise UserError(CACHE, cache_folder(), problem, remedy) from error


def _is_whole(folder: Path) -> bool:
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        crc32 = summary.pop("crc32")
        return bool(crc32 == _compute_crc32(folder / ROWS, summary))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _compute_crc32(rows: Path, summary: Mapping[str, Any]) -> int:
    crc32 = zlib.crc32(json.dumps(summary, sort_keys=True).encode())
    with rows.open("rb") as opened:
        while part := opened.read(2**20):
            crc32 = zlib.crc32(part, crc32)
    return crc32


def _write(folder: Path, files: Sequence[Path], setting: str, encode: Encode) -> None:
    import pyarrow

    rows = 0
    stored = 0
    longest = 0
    share = 0.0
    writer = None
    schema = None
    data_sources: set[str] = set()
    with (
        report_progress(f"tokenising {files[0]}", 1.0, unit="share") as advance,
        (folder / ROWS).open("wb") as sink,
    ):
        for number, file in enumerate(files):
            for batch in read_batches(file, setting, BATCH):
                encoded = encode(batch.rows)
                data_sources |= {str(row.values.get("data_source") or "") for row in batch.rows}
                kept = [index for index, each in enumerate(encoded) if each is not None]
                rows += len(encoded)
                stored += len(kept)
                if kept:
                    keys, columns = zip(*filter(None, encoded), strict=True)
                    longest = max(longest, *(sum(map(len, each)) for each in columns))
                    values = batch.values
                    if isinstance(values, list):
                        values = pyarrow.array(values, pyarrow.large_binary())
                    arrays = {
                        "file": pyarrow.array([number] * len(kept), pyarrow.int32()),
                        "number": pyarrow.array(batch.numbers, pyarrow.int64()).take(kept),
                        "values": values.take(kept),
                        "key": pyarrow.array(keys, pyarrow.int64()),
                    }
                    for i, tokens in enumerate(zip(*columns, strict=True)):
                        arrays[f"tokens{i}"] = _build_list_array(tokens)
                    part = pyarrow.RecordBatch.from_pydict(arrays)
                    schema = schema or part.schema
                    if part.schema != schema:
                        problem = (
                            f"is of another kind than {files[0]}, or has other columns or types"
                        )
                        raise UserError(
                            setting,
                            file,
                            problem,
                            "Write both in one form, or name them as two sources",
                        )
                    writer = writer or pyarrow.ipc.new_file(sink, schema)
                    writer.write_batch(part)
                before = share
                share = (number + batch.done) / len(files)
                advance(share - before, f"{rows:,} rows")
        if not rows:
            raise UserError(
                setting, files[0], "holds no rows", "Give a file with at least one prompt"
            )
        if writer is None:
            problem = f"all {rows} prompts are longer than data.max_prompt_tokens"
            remedy = "Raise the limit"
            raise UserError(setting, files[0], problem, remedy)
        writer.close()
        sink.flush()
        # A machine that stops could otherwise leave an empty file under the final name.
        os.fsync(sink.fileno())
    summary: dict[str, Any] = {
        "dropped": rows - stored,
        "longest": longest,
        "data_sources": sorted(data_sources),
    }
    summary["crc32"] = _compute_crc32(folder / ROWS, summary)
    (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


def _build_list_array(rows: Sequence[list[int]]) -> Any:
    import pyarrow

    starts = np.cumsum([0, *map(len, rows)])
    # An Arrow list column is the tokens of all rows, with the offset of each row.
    tokens = np.fromiter((token for row in rows for token in row), np.int32, starts[-1])
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(starts, pyarrow.int32()), pyarrow.array(tokens)
    )


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer, chat templates included."""
    return sorted(
        {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    )


def _hash_tokenizer(folder: Path) -> str:
    files = list_tokenizer_files(folder)
    names_and_digests = "".join(file.name + file_digest(file) for file in files)
    return hashlib.sha256(names_and_digests.encode()).hexdigest()
