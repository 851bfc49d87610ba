#!/usr/bin/env bash
# shellcheck disable=SC2329,SC2016 # step calls functions by their names, the inner bash expands
# Checks this project on one GPU, in two parts of at most six and four minutes:
#
#   bash scripts/check_gpu.sh A   # versions, attention, kernels, a step of Qwen3-1.7B, tests of the GPU, whole runs
#   bash scripts/check_gpu.sh B   # steps of Qwen3-4B and 0.6B, rates that plans assume
#
# Each step has a time limit. Last come the archive of all logs, to be sent back, and a table of the steps: seconds and
# exit code, 124 for a step that took too long.
# From the environment: DRY_RUN=1 prints the steps and runs none; PYTHON: the interpreter (default: the checkout's
# .venv, or python3); OUT: folder of logs (default: check_gpu).
# Exit codes: 0 all steps passed; 1 a step failed; 2 a wrong argument, or no GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
part=${1:-}
[[ $part = [AB] ]] || { echo "error: part = $part: write A or B: bash scripts/check_gpu.sh A" >&2; exit 2; }
if [ "${DRY_RUN:-0}" = 0 ] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "error: this machine has no GPU: nvidia-smi lists none; DRY_RUN=1 prints the steps" >&2
    exit 2
fi
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
logs=${OUT:-check_gpu}/$part
table=$logs/table.txt
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1
export python

step() { # NAME SECONDS COMMAND…: run a step within its limit, and add a row to the table
    local name=$1 limit=$2 code=0 began=$SECONDS
    shift 2
    if [ "${DRY_RUN:-0}" != 0 ]; then
        printf '%-18s %4d s  %s\n' "$name" "$limit" "$*"
        return
    fi
    echo "$name: at most $limit s"
    ! declare -F "$1" >/dev/null || set -- bash -c '"$0" "$@"' "$@"
    timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 || code=$?
    printf '%-18s %7d %4d\n' "$name" $((SECONDS - began)) "$code" >>"$table"
    return "$code"
}
finish() { # archive and table
    [ "${DRY_RUN:-0}" = 0 ] || exit 0
    tar -czf "$logs.tar.gz" --exclude=checkpoints --exclude='*.safetensors' -C "$(dirname "$logs")" "$part"
    echo "archive to send back: $(realpath "$logs.tar.gz")"
    cat "$table"
    awk 'NR > 1 && $3 != 0 { failed = 1 } END { exit failed }' "$table"
    exit
}
versions() {
    nvidia-smi && "$python" -m megatron_dppo doctor && "$python" -c '
import torch
print("cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version(), torch.cuda.get_device_properties(0))'
}
attention() { # LOG: attention over packs is fused, by the log of Transformer Engine
    NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 "$python" benchmarks/gpu_rates.py --json --only attention >"$1" 2>&1 || return
    grep "Selected backend" "$1" && ! grep -q "Selected backend = Unfused" "$1"
}
resumed() { # RUN COMMAND…: kill a run after its first checkpoint, and resume it to its end
    local run=$1 process
    shift
    "$@" "run.dir=$run" run.checkpoint_every=1 &
    process=$!
    until [ -e "$run/checkpoints/latest_checkpointed_iteration.txt" ]; do
        kill -0 "$process" || { wait "$process"; return; }
        sleep 0.5
    done
    kill -KILL "$process"
    wait "$process"
    "$@" "run.dir=$run" run.checkpoint_every=1
}
experts() { # FOLDER
    "$python" -m megatron_dppo init "$1/policy" --tokenizer arithmetic --layers 4 --ffn 128 --experts 8 --untied &&
        resumed "$1/run" "$python" -m megatron_dppo train configs/quickstart.yaml "model.path=$1/policy" \
            model.dtype=bf16 layout.tp=1 layout.dp=1 run.steps=3 eval.problems=20
}
export -f versions attention resumed experts

if [ "${DRY_RUN:-0}" = 0 ]; then
    rm -rf "$logs" && mkdir -p "$logs" || exit 2
    printf '%-18s %7s %4s\n' step seconds code >"$table"
fi
step_of=("$python" benchmarks/gpu_step.py --json --shapes)
case $part in
A)
    good=1
    step versions 20 versions || good=0
    step attention 40 attention "$logs/backend.txt" || good=0
    step head 40 "$python" benchmarks/policy_head.py --cuda --json || good=0
    [ $good = 1 ] || finish # nothing else could pass
    step step-1.7b 100 "${step_of[@]}" 1.7b --sync-debug --profile "$logs/kernels.txt"
    step tests 90 "$python" -m pytest -q -n 6 -m gpu tests/gpu
    step nccl 60 "$python" -m torch.distributed.run --nproc-per-node 1 -m megatron_dppo.launch.health &
    step experts 70 experts "$logs/experts" &
    step quickstart 70 resumed "$logs/quickstart" "$python" -m megatron_dppo quickstart model.dtype=bf16 run.steps=20 &
    wait
    ;;
B)
    step step-4b 65 "${step_of[@]}" 4b
    step step-4b-recompute 65 "${step_of[@]}" 4b --recompute full
    step step-0.6b 30 "${step_of[@]}" 0.6b
    step rates 50 "$python" benchmarks/gpu_rates.py --json
    step head-8b 30 "$python" benchmarks/policy_head.py --cuda --json --hidden 4096
    ;;
esac
finish
