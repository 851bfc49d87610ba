#!/usr/bin/env bash
# Kills parts of small runs at random and resumes the runs, N times (100 without an argument): ranks, launchers and
# writers of checkpoints. Prints everything that was lost, changed or left behind.
# With --servers the runs are two steps ahead of two SGLang servers, which the script installs. Servers, ranks,
# launchers, the judge and reward workers are killed, N times in all.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
case " $* " in *" --servers "*) source scripts/install_servers.sh ;; esac
python -m tests.chaos "$@"
