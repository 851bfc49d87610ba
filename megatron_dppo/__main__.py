"""``python -m megatron_dppo``, for where no console script is on the path."""

import sys

from megatron_dppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
