"""``python -m megatron_dppo``: the command line without a console script on the path."""

from megatron_dppo.cli import entry

if __name__ == "__main__":
    entry()
