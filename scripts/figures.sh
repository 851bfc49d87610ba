#!/usr/bin/env bash
# Makes the tables and pictures of the documentation that show measurements, from the figures in benchmarks/results.
# Names of benchmarks, such as packing, have these measured again first: bash scripts/figures.sh packing verdicts
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
python tools/site/figures.py "$@"
python benchmarks/time_to_accuracy.py --picture docs/speed.png >/dev/null
python benchmarks/real_curves.py --seeds 0 --earlier benchmarks/results/real_curves.json --picture docs/real_curves.png >/dev/null
python benchmarks/paper_table.py --task losses --seeds 3 --jobs 2 --picture docs/losses.png >/dev/null
