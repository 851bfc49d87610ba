#!/usr/bin/env bash
# Makes an environment each for SGLang and vLLM on CPU, once for each state of their lists of requirements, and names
# their interpreters in SGLANG_PYTHON and VLLM_PYTHON. Usage: source scripts/install_servers.sh, after install.sh.
#
# They are kept in MEGATRON_DPPO_CACHE (by default ~/.cache/megatron_dppo), 6 GB together. What is said in install.sh of
# CPU builds of torch holds here too.
set -euo pipefail

server_python() {  # KIND: prints the interpreter of its environment, which is made first if need be
    local list=tests/servers/requirements-$1.txt cache=${MEGATRON_DPPO_CACHE:-$HOME/.cache/megatron_dppo}
    local place; place=$cache/$1-$({ "$python" --version; cat "$list"; } | sha256sum | cut -c1-16)
    mkdir -p "$cache"
    {
        flock 9
        if [ ! -e "$place/complete" ]; then
            echo "installing $1 into $place (once; the log is $place.log)" >&2
            rm -rf "$place"
            : >"$place.log"
            { "$python" -m venv "$place" &&
                "$place/bin/python" -m pip install --disable-pip-version-check --no-deps -r "$list"; } 2>&1 |
                show_pip "$place.log" ||
                { tail -n 20 "$place.log" >&2; echo "the installation failed; the whole log is $place.log" >&2; return 1; }
            touch "$place/complete"
        fi
    } 9>"$place.lock"
    echo "$place/bin/python"
}

SGLANG_PYTHON=$(server_python sglang)
VLLM_PYTHON=$(server_python vllm)
export SGLANG_PYTHON VLLM_PYTHON
