#!/usr/bin/env bash
# From nothing to a trained policy on two cores: a fresh Qwen3 of about a million parameters learns written-out sums,
# first from worked answers, then by DPPO under tensor parallelism with both levels of pruning.
# Arguments are settings for the training, such as loss.name=dapo. Run again, it resumes or shows what it has.
set -euo pipefail
source "$(dirname "$0")/install.sh" cpu
run=runs/quickstart

if [ ! -e $run/initial/config.json ]; then
    megatron-dppo init $run/initial --tokenizer arithmetic --hidden 128 --layers 4 --heads 4 --kv-heads 2 --ffn 384
fi
if [ ! -e $run/warm/config.json ]; then
    megatron-dppo sft configs/quickstart.yaml model.path=$run/initial sft.out=$run/warm
fi
megatron-dppo train configs/quickstart.yaml model.path=$run/warm "$@"
