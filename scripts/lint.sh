#!/usr/bin/env bash
# Style, imports, types and shell scripts, with .venv/bin on the path.
set -euo pipefail
ruff check .
ruff format --check .
lint-imports --no-logo --no-cache
MYPY_NUM_WORKERS=2 mypy
python tools/mutation/mistakes.py --check
shellcheck -x -P SCRIPTDIR scripts/{lint,nightly,test,check_gpu,install_slurm,install_browser}.sh scripts/slurm/*.sh .ci/run
