#!/usr/bin/env bash
# Runs tests in the project's own virtual environment; arguments behind the tier go to pytest.
#   (none)     the quick tier, five minutes on two cores: lint, types, and all tests but those in tests/slow.txt
#   --all      the quick tier and the second: whole runs over layouts, families and engines, documentation, rehearsals
#   --measure  --all, which writes the ids of tests that took a second or more to tests/slow.txt
#   --servers  tests with real SGLang and vLLM servers on CPU, which it installs
#   --slurm    tests with a Slurm cluster on this machine's loopback, which it installs (as root, on Debian or Ubuntu)
#   --browser  tests that look at a report in Chromium, which it installs (as root, on Debian)
#   --newest   tests that depend on the version of Megatron-Core, and rehearsals of all settings, with the newest version
#              that is supported, on Python 3.12, in .venv-newest (5 GB: pip finds a build of torch with CUDA)
#   --trl, --verl  tests of pruning in TRL and in verl, in .venv-trl and .venv-verl
# With INSTALL_ONLY=1 a tier is installed and not run.
set -euo pipefail
tier=quick
case ${1:-} in --*)
    case $1 in
    --all | --measure | --servers | --slurm | --browser | --newest | --trl | --verl) tier=${1#--} && shift ;;
    esac ;;
esac
extras=cpu,dev
[ "$tier" != slurm ] || extras+=,nemo-run
[ "$tier" != verl ] || { extras+=,verl && export VENV=.venv-verl; }
[ "$tier" != trl ] || { extras=cpu,trl && export VENV=.venv-trl; }
if [ "$tier" = newest ]; then
    for python in "${PYTHON:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || break
        python=
    done
    [ -n "$python" ] || { echo "Python 3.12 is needed: install it, or name it in PYTHON" >&2; exit 2; }
    export PYTHON=$python VENV=.venv-newest
fi
source "$(dirname "$0")/install.sh" "$extras"
newest=(
    tests/models tests/parallel tests/bridge/test_{torch_dist,load}.py tests/trainer/test_*checkpoint*.py
    tests/trainer/test_{learner,resume}.py tests/rehearsal
    tests/laws/test_{parity,real_gradients,resume,routing_replay,split_invariance}.py
)
export OMP_NUM_THREADS=1
# A build of torch with CUDA, but no GPU: ranks can be forks, which start sooner.
command -v nvidia-smi >/dev/null || export RANKS_ARE=${RANKS_ARE:-forkserver}
installed() { [ "${INSTALL_ONLY:-}" ] && echo "installed: $tier"; }
names_tests() { for word in "$@"; do [[ $word != tests/* ]] || return 0; done; return 1; }
case $tier in
servers)
    source scripts/install_servers.sh
    names_tests "$@" || set -- tests/servers "$@"
    installed || python -m pytest -m servers --durations 20 "$@"
    ;;
slurm)
    source scripts/install_slurm.sh
    source scripts/install_servers.sh
    names_tests "$@" || set -- tests/slurm "$@"
    installed || SLURM_LOOPBACK=1 python -m pytest -m slurm --durations 20 "$@"
    ;;
browser)
    source scripts/install_browser.sh
    installed || python -m pytest -m browser tests/report "$@"
    ;;
newest)
    export REHEARSAL_CASES=${REHEARSAL_CASES:-all} REHEARSAL_TRANSFORMER_ENGINE=2.20.2
    bash scripts/install_te_python.sh
    names_tests "$@" || set -- "${newest[@]}" "$@"
    installed || python -m pytest --numprocesses 2 --dist loadgroup --durations 20 "$@"
    ;;
trl)
    python -c 'import pytest' 2>/dev/null || python -m pip install --quiet 'pytest>=8'
    installed || python -m pytest --noconftest --durations 5 tests/integrations/test_trl.py "$@" # tests/conftest.py requires Megatron
    ;;
verl)
    installed || python -m pytest tests/integrations/test_verl.py "$@"
    ;;
*)
    bash scripts/install_te_python.sh || true # offline, the tests in tests/rehearsal fail and name this script
    ! installed || exit 0
    choice=()
    [ "$tier" != quick ] || choice=(-m "not slow")
    [ "$tier" != measure ] || choice=(--measure)
    bash scripts/lint.sh
    python -m pytest --numprocesses 2 --dist loadgroup --durations 20 "${choice[@]}" "$@"
    ;;
esac
