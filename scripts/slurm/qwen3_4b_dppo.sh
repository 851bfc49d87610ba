#!/usr/bin/env bash
# Qwen3-4B by DPPO on one node of eight GPUs: two GPUs train, six are those of SGLang servers that the run starts itself.
# From the root of the checkout:
#
#   export SERVER_PYTHON=/shared/sglang/bin/python  # docs/cluster.md
#   megatron-dppo train configs/qwen3_4b_math.yaml --check
#   sbatch scripts/slurm/qwen3_4b_dppo.sh pruning.completions.keep=0.3
#   sbatch --ntasks-per-node=8 scripts/slurm/qwen3_4b_dppo.sh rollout.colocated=true rollout.launch.count=8 \
#       rollout.ahead=0 rollout.sync.transport=disk rollout.sync.folder=/dev/shm/megatron_dppo \
#       rollout.launch.flags=[--mem-fraction-static=0.7]
#       # all eight train and generate in turns
#
# The first word may name another configuration. scripts/slurm/job.sh says which variables are read, and what
# exit codes mean.
#
#SBATCH --job-name=qwen3-4b-dppo
#SBATCH --output=%x-%j.log --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600 --requeue
# One task for each rank; the servers have the GPUs that ranks leave.
#SBATCH --nodes=1 --ntasks-per-node=2 --gpus-per-node=8 --exclusive --mem=0
cd "$SLURM_SUBMIT_DIR" || exit 2
[ -e scripts/slurm/job.sh ] || { echo "error: submit this from the folder that holds scripts/slurm, not from $PWD"; exit 2; }
source scripts/slurm/job.sh configs/qwen3_4b_math.yaml "$@"
