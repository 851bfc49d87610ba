#!/usr/bin/env bash
# Unpacks the Python of Transformer Engine, without its compiled half, for rehearsals of the GPU path: once, into
# MEGATRON_DPPO_CACHE (by default ~/.cache/megatron_dppo), 4 MB. It is not installed into .venv, where it would change
# the modules that Megatron imports. REHEARSAL_TRANSFORMER_ENGINE names another version than 2.14.1.
# Usage: bash scripts/install_te_python.sh, with .venv/bin on the path. Offline it fails.
set -euo pipefail

te_python() { # downloads and unpacks the two wheels
    local version=${REHEARSAL_TRANSFORMER_ENGINE:-2.14.1}
    local cache=${MEGATRON_DPPO_CACHE:-$HOME/.cache/megatron_dppo} place
    place=$cache/transformer-engine-$version
    mkdir -p "$cache"
    {
        flock 9
        [ ! -e "$place/transformer_engine" ] || return 0
        local draft; draft=$(mktemp -d "$cache/draft-XXXXXX")
        echo "unpacking Transformer Engine's Python into $place (once)" >&2
        if ! python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: --dest "$draft" \
            transformer-engine=="$version" nvdlfw-inspect==0.2.2 >"$place.log" 2>&1; then
            tail -n 5 "$place.log" >&2
            echo "Transformer Engine's Python cannot be downloaded: the tests in tests/rehearsal will fail" >&2
            rm -rf "$draft"
            return 1
        fi
        for wheel in "$draft"/*.whl; do python -m zipfile -e "$wheel" "$draft/unpacked"; done
        mv "$draft/unpacked" "$place"
        rm -rf "$draft"
    } 9>"$place.lock"
}

te_python
