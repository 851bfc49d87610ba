"""Memory of the trainer's, opened by the words in which torch tells of it. Nothing is ever unpickled."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions


def opened(words: Sequence[Any], size: int, device: torch.device) -> torch.Tensor:
    """The bytes behind a handle, ``[size]``, uint8, on this worker's own device. To be called once for each handle.

    Args:
        words: three that name POSIX shared memory; or the UUID of a GPU, and what torch says of memory there. Bytes
            among them come in base64, each in a list of its own.
        size: of the bucket.
        device: of the worker.

    Raises:
        ValueError: the memory is another GPU's.
    """
    plain = [base64.b64decode(word[0]) if isinstance(word, list) else word for word in words]
    if device.type != "cuda":
        storage = torch.UntypedStorage._new_shared_filename_cpu(*plain)._shared_decref()
        return torch.empty(0, dtype=torch.uint8).set_(storage)[:size]
    uuid, *rest = plain
    own = str(torch.cuda.get_device_properties(device).uuid)
    if uuid != own:
        raise ValueError(f"memory of GPU {uuid} was handed to a worker on GPU {own}")
    form = torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8
    return reductions.rebuild_cuda_tensor(*form, device.index, *rest)
