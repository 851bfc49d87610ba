#!/usr/bin/env bash
# Makes the virtual environment .venv with this project and the given extras, once for each state of pyproject.toml.
# Usage: source scripts/install.sh cpu[,dev…]
#
# PYTHON names another interpreter, VENV another folder than .venv. Without a GPU a CPU build of torch is enough: where pip would fetch the CUDA build
# (some gigabytes), point PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at a place that has the CPU build: PyTorch's
# own index of them, as docs/gpu.md says, or a folder of wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

show_pip() { # LOG: takes down what pip says, and shows what it is at with the seconds since it began
    local line='' half='' doing='' last=-10 began=$SECONDS
    while :; do
        if IFS= read -r -t 1 line; then
            line=$half$line half=
            printf '%s\n' "$line" >>"$1"
            case $line in Collecting* | *Downloading* | Building* | Installing*) doing=${line#"${line%%[! ]*}"} ;; *) continue ;; esac
        elif (($? > 128)); then # a second has passed
            half+=$line
        else
            break
        fi
        if [ -t 2 ]; then
            printf '\r\033[K[%4d s] %.70s' $((SECONDS - began)) "$doing" >&2
        elif [ $((SECONDS - last)) -ge 10 ]; then
            printf '[%4d s] %.70s\n' $((SECONDS - began)) "$doing" >&2
            last=$SECONDS
        fi
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
    printf '[%4d s] pip has ended\n' $((SECONDS - began)) >&2
}

extras=$1
venv=${VENV:-.venv}
python=${PYTHON:-}
for candidate in python3.11 python3.12 python3.13 python3; do
    [ -n "$python" ] || ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
        python=$candidate
done
[ -n "$python" ] || { echo "Python 3.11, 3.12 or 3.13 is needed: install one, or name it in PYTHON" >&2; exit 2; }

state=$(sha256sum pyproject.toml setup.py | sha256sum | cut -c1-16)
stamp="$venv/installed-$extras-$state"
for earlier in "$venv"/installed-*-"$state"; do # one that had all of these extras, and perhaps more
    has=${earlier#"$venv/installed-"}
    has=,${has%"-$state"},
    for extra in ${extras//,/ }; do
        [[ $has == *",$extra,"* ]] || continue 2
    done
    stamp=$earlier
done
if [ ! -e "$stamp" ]; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "installing into $venv (once; the log is $venv/install.log)"
    : >"$venv/install.log"
    "$venv/bin/python" -m pip install --disable-pip-version-check -e ".[$extras]" 2>&1 | show_pip "$venv/install.log" ||
        { tail -n 20 "$venv/install.log" >&2; echo "the installation failed; the whole log is $venv/install.log" >&2; exit 1; }
    touch "$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"
