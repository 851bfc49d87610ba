"""Fingerprints of a policy's stored weights: a resume, adapters and ``compress`` recognise the policy by them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import METADATA, find_checkpoint
from megatron_dppo.bridge.checksums import FILE
from megatron_dppo.bridge.safetensors_files import stored_tensors
from megatron_dppo.process.files import file_digest, state_of

SAMPLES, SAMPLE_BYTES = 64, 2**14
"""Evenly spaced stretches of a file that are read, and their length: 1 MiB in all, or the whole of a smaller file."""


def fingerprint(path: Path, checkpoint: Path | None) -> str:
    """One digest of :func:`weight_digests`."""
    return hashlib.sha256(json.dumps(weight_digests(path, checkpoint)).encode()).hexdigest()


def weight_digests(path: Path, checkpoint: Path | None) -> dict[str, str]:
    """A digest of each file of the weights that ``model.path`` and ``model.checkpoint`` name, by the file's name.

    A safetensors file's digest covers its size, its header, and a sample of its bytes: training changes nearly all
    weights, so that 1 MiB of any file tells. A few changed weights of a larger file may be missed. A checkpoint's
    digest is that of its checksums. The same weights in other files, or in another type, have other digests.

    Raises:
        UserError: if there are no weights.
    """
    if checkpoint is not None:
        place = find_checkpoint(checkpoint)
        index = place / FILE if (place / FILE).is_file() else place / METADATA
        return {index.name: file_digest(index)}
    files = sorted({tensor.file for tensor in stored_tensors(path).values()})
    return {file.name: _sampled(file, *state_of(file)) for file in files}


@cache
def _sampled(file: Path, *state: int) -> str:
    size = file.stat().st_size
    seen = hashlib.blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as opened:
        length = opened.read(8)
        seen.update(opened.read(int.from_bytes(length, "little")))
        for start in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            opened.seek(start)
            seen.update(opened.read(SAMPLE_BYTES))
    return seen.hexdigest()
