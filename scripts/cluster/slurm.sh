#!/usr/bin/env bash
# Several nodes under Slurm: one launcher a node, accelerate's processes under it. Edit the lines below, then
#   sbatch scripts/cluster/slurm.sh configs/llama31-8b-eagle3.yaml
# The checkout, the models and the output must lie on a file system that all nodes share. A job that is preempted gets
# SIGTERM, saves and ends; Slurm requeues it, and it goes on where it was.
#SBATCH --job-name=distill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@600
#SBATCH --requeue
set -euo pipefail
config=${1:?usage: sbatch scripts/cluster/slurm.sh CONFIG [SECTION.FIELD=VALUE]...}
shift
launch=${LAUNCH:-zero3} # a file of configs/accelerate
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# shellcheck disable=SC2016 # SLURM_NODEID is each node's own
exec srun --kill-on-bad-exit=1 bash -c 'exec .venv/bin/accelerate launch --machine_rank "$SLURM_NODEID" "$@"' node \
    --config_file "configs/accelerate/$launch.yaml" \
    --num_machines "$SLURM_NNODES" \
    --num_processes $((SLURM_NNODES * SLURM_GPUS_PER_NODE)) \
    --main_process_ip "$head_node" \
    --main_process_port 29500 \
    --deepspeed_multinode_launcher standard \
    -m distill --config "$config" "$@"
