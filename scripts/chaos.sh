#!/usr/bin/env bash
# Kills parts of small runs at random and starts them again, N times (100 without an argument): ranks, launchers, writers
# of checkpoints and, where SGLANG_PYTHON names an environment with SGLang, servers. Says what was lost, changed or left.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
python -m tests.chaos "$@"
