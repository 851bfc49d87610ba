"""``python -m tests.rehearsal CONFIG SETTING=VALUE …``: rehearse an update of a run, from the root
of a checkout."""

import argparse
import sys
from collections.abc import Sequence

from megatron_dppo.cli import read_config
from megatron_dppo.errors import MistakesError, UserError, format_error
from tests.rehearsal.command import rehearse


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 2 for a mistake that the user can mend, or if the rank does not fit on
    its GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    settings = (
        "a YAML file and overrides; cluster.* describes the machines, assume.* the assumptions"
    )
    parser.add_argument("settings", nargs="*", metavar="CONFIG SETTING=VALUE", help=settings)
    parser.add_argument("--json", action="store_true", help="print JSON")
    rank = parser.add_mutually_exclusive_group()
    rank.add_argument("--rank", metavar="N", type=int, help="rank of the trainer")
    stage = (
        "first rank of this pipeline stage (default: of the stage with the highest planned peak)"
    )
    rank.add_argument("--stage", choices=("first", "last"), help=stage)
    chosen = parser.parse_intermixed_args(arguments)
    assumed = [word for word in chosen.settings if word.startswith("assume.")]
    try:
        config = read_config([word for word in chosen.settings if word not in assumed])
        return rehearse(
            config, assumed, rank=chosen.rank, stage=chosen.stage, json_wanted=chosen.json
        )
    except (UserError, MistakesError) as error:
        print(format_error(error), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
