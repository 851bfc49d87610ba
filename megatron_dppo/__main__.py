"""``python -m megatron_dppo``, for where no console script is on the path."""

from megatron_dppo.cli import entry

if __name__ == "__main__":
    entry()
