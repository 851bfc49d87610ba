#!/usr/bin/env bash
# From nothing to a trained policy on two cores. A fresh Qwen3 of a million parameters learns written-out sums from a
# teacher who mostly forgets to carry, then by DPPO, under tensor parallelism and with both levels of pruning, to carry.
# Arguments are settings for the training, such as loss.name=dapo. Run again, it resumes or shows what it has.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu
run=runs/quickstart

if [ ! -e $run/initial/config.json ]; then
    megatron-dppo init $run/initial --tokenizer arithmetic --init-std 0.05
fi
if [ ! -e $run/warm/config.json ]; then
    megatron-dppo sft configs/quickstart.yaml model.path=$run/initial sft.out=$run/warm \
        layout.tp=1 layout.dp=2 data.arithmetic.problems=8192
fi
megatron-dppo train configs/quickstart.yaml model.path=$run/warm "$@"
