#!/usr/bin/env bash
# Several nodes without a scheduler: ssh to every host of a file, one launcher each.
#   scripts/cluster/hostfile.sh HOSTFILE configs/llama31-8b-eagle3.yaml [SECTION.FIELD=VALUE]...
# HOSTFILE has one `host slots=N` a line, as DeepSpeed's has; the first host is the main one. The checkout lies at the
# same path on each, with the models and the output on a file system that all share.
set -euo pipefail
hostfile=${1:?usage: scripts/cluster/hostfile.sh HOSTFILE CONFIG [SECTION.FIELD=VALUE]...}
config=${2:?usage: scripts/cluster/hostfile.sh HOSTFILE CONFIG [SECTION.FIELD=VALUE]...}
shift 2
launch=${LAUNCH:-zero3} # a file of configs/accelerate
ssh=${SSH:-ssh -tt} # a terminal, so that what runs there ends with the connection
wait_s=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
mapfile -t hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$hostfile")
processes=$(awk 'NF && $1 !~ /^#/ { split($2, part, "="); total += part[2] } END { print total }' "$hostfile")

pids=()
for rank in "${!hosts[@]}"; do
    command=$(printf '%q ' cd "$PWD")"&& "$(printf '%q ' exec env TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$wait_s" .venv/bin/accelerate launch \
        --config_file "configs/accelerate/$launch.yaml" --num_machines "${#hosts[@]}" --num_processes "$processes" \
        --machine_rank "$rank" --main_process_ip "${hosts[0]}" --main_process_port 29500 \
        --deepspeed_multinode_launcher standard -m distill --config "$config" "$@")
    $ssh "${hosts[$rank]}" "$command" &
    pids+=($!)
done
# The first that fails ends the others, which would wait for it.
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT
for _ in "${pids[@]}"; do wait -n; done
