"""Which warnings of upstream packages a process keeps to itself."""

from __future__ import annotations

import warnings


def quieten() -> None:
    """Silence what upstream code says to its own developers on every rank, and nothing else.

    Megatron-Core warns of every optional package that is absent (``doctor`` tells of those) and of its own deprecated
    defaults; torch of collectives' old names, which Megatron-Core still calls.
    """
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r".*ShardedTensor", category=FutureWarning)
