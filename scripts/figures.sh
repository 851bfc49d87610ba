#!/usr/bin/env bash
# Draws the documentation's figures from the measurements that benchmarks/results/ stores. Each stored file names the
# command, commit, processor and date of its measurement.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu
python benchmarks/speed_curve.py --draw docs/speed.png
