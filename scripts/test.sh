#!/usr/bin/env bash
# Runs the tests in the project's own virtual environment; arguments go to pytest. With --servers first, it runs those
# that need real SGLang and vLLM servers, on CPU, and installs those; with --slurm those that need a Slurm cluster, which
# it installs (as root, on Debian or Ubuntu) and brings up on this machine's loopback; with --browser those that look at
# a report in Chromium, which it installs (as root, on Debian); with --newest those that depend on the version of
# Megatron-Core, and rehearsals of all settings, with the newest version that is supported. That one requires Python 3.12,
# and is installed into .venv-newest (5 GB: pip finds a build of torch with CUDA). With --trl and --verl it runs the tests of
# pruning in TRL and in verl, in environments of their own: .venv-trl and .venv-verl.
set -euo pipefail
extras=cpu,dev
[ "${1:-}" != --slurm ] || extras+=,nemo-run
[ "${1:-}" != --verl ] || { extras+=,verl && export VENV=.venv-verl; }
if [ "${1:-}" = --newest ]; then
    for python in "${PYTHON:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || break
        python=
    done
    [ -n "$python" ] || { echo "Python 3.12 is needed: install it, or name it in PYTHON" >&2; exit 2; }
    export PYTHON=$python VENV=.venv-newest
fi
if [ "${1:-}" = --trl ]; then
    extras=cpu,trl
    export VENV=.venv-trl
fi
source "$(dirname "$0")/install.sh" "$extras"
newest=(
    tests/models tests/parallel tests/bridge/test_{torch_dist,load_checkpoint}.py tests/trainer/test_*checkpoint*.py
    tests/trainer/test_{learner,resume,resume_settings,routing_replay}.py
    tests/test_{context_parallel,families,lora,split_invariance,real_gradients}.py tests/rehearsal
)
export OMP_NUM_THREADS=1
case ${1:-} in
--servers)
    shift
    source scripts/install_servers.sh
    python -m pytest -m servers --durations 20 tests/servers "$@"
    ;;
--slurm)
    shift
    source scripts/install_slurm.sh
    source scripts/install_servers.sh
    SLURM_LOOPBACK=1 python -m pytest -m slurm --durations 20 tests/slurm "$@"
    ;;
--browser)
    shift
    source scripts/install_browser.sh
    python -m pytest -m browser tests/report "$@"
    ;;
--newest)
    shift
    export REHEARSAL_CASES=all REHEARSAL_TRANSFORMER_ENGINE=2.20.2
    bash scripts/install_te_python.sh
    python -m pytest --numprocesses 2 --dist loadfile --durations 20 "${newest[@]}" "$@"
    ;;
--trl)
    shift
    python -c 'import pytest' 2>/dev/null || python -m pip install --quiet 'pytest>=8'
    python -m pytest --noconftest --durations 5 tests/integrations/test_trl.py "$@" # tests/conftest.py requires Megatron
    ;;
--verl)
    shift
    python -m pytest tests/integrations/test_verl.py "$@"
    ;;
*)
    bash scripts/install_te_python.sh || true # offline, the tests in tests/rehearsal fail and name this script
    ruff check .
    ruff format --check .
    MYPY_NUM_WORKERS=2 mypy
    shellcheck -x scripts/slurm/*.sh scripts/install_slurm.sh scripts/install_browser.sh
    python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 40 "$@"
    ;;
esac
