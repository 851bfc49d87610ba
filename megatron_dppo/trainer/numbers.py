"""Numbers among the settings that no clock, no generator and no 32-bit arithmetic holds."""

from __future__ import annotations

import math

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError

MOST_SECONDS, MOST_FLOAT, MOST_WHOLE = 1e9, 1e30, 2**63 - 1


def check_numbers(config: Config) -> None:
    """
    Raises:
        UserError: naming the first setting with such a number. An infinity that is no time is a limit left out.
    """
    for key, value in config.leaves():
        if not isinstance(value, int | float) or (value == math.inf and not key.endswith("_s")):
            continue
        most = MOST_SECONDS if key.endswith("_s") else MOST_FLOAT if isinstance(value, float) else MOST_WHOLE
        if value > most:
            problem = "is more than can be computed with"
            raise UserError(key, f"{value!s:.40}", problem, f"Set it to {most:g} or less")
