#!/usr/bin/env bash
# Kills parts of small runs at random and starts them again, N times (100 without an argument): ranks, launchers, writers
# of checkpoints and, where SGLANG_PYTHON names an environment with SGLang, servers; or has a user's conversation exit,
# hang or return nonsense. Says what was lost, changed or left.
# With --servers the runs are two steps ahead of two SGLang servers, which it installs, and servers, ranks, launchers,
# judges and reward workers are killed, or a conversation misbehaves, N times in all.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
case " $* " in *" --servers "*) source scripts/install_servers.sh ;; esac
python -m tests.chaos "$@"
