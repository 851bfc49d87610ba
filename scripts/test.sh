#!/usr/bin/env bash
# Runs the tests in the project's own virtual environment; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
ruff check . && ruff format --check .
python -m pytest "$@"
