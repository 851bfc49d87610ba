#!/usr/bin/env bash
# Runs the tests in the project's own virtual environment; arguments go to pytest. With --servers first, it runs those
# that need real SGLang and vLLM servers, on CPU, and installs those.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu,dev
export OMP_NUM_THREADS=1
case ${1:-} in
--servers)
    shift
    source scripts/install_servers.sh
    python -m pytest -m servers tests/servers "$@"
    ;;
*)
    ruff check . && ruff format --check .
    python -m pytest "$@"
    ;;
esac
