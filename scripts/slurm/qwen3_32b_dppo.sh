#!/usr/bin/env bash
# Qwen3-32B by DPPO: actors on two nodes, SGLang servers on six more, eight GPUs each. From the root of the checkout:
#
#   export SERVER_PYTHON=/shared/sglang/bin/python  # docs/cluster.md
#   megatron-dppo train configs/qwen3_32b_dppo.yaml --check
#   sbatch --test-only scripts/slurm/qwen3_32b_dppo.sh
#   sbatch scripts/slurm/qwen3_32b_dppo.sh pruning.completions.keep=0.3
#   sbatch --nodes=4 : --nodes=8 scripts/slurm/qwen3_32b_dppo.sh
#
# The first word may name another configuration. scripts/slurm/job.sh says which variables are read, and what
# exit codes mean.
#
#SBATCH --job-name=qwen3-32b-dppo
#SBATCH --output=%x-%j.log --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600 --requeue
# The actors: one rank for each GPU.
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH hetjob
# The servers: one for each task; several on a node if they take fewer GPUs than it has.
#SBATCH --nodes=6 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
cd "$SLURM_SUBMIT_DIR" || exit 2
[ -e scripts/slurm/job.sh ] || { echo "error: submit this from the folder that holds scripts/slurm, not from $PWD"; exit 2; }
source scripts/slurm/job.sh configs/qwen3_32b_dppo.yaml "$@"
