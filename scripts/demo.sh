#!/usr/bin/env bash
# The main job from start to end, on any machine: answers, draft, report. What is there already is reused.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false

echo "1/3  the target answers 320 prompts"
draftsmith data --config configs/demo.yaml
echo "2/3  a two-layer draft learns from the target's logits"
accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    -m distill --config configs/demo.yaml
echo "3/3  what is it worth?"
draftsmith eval --target models/smollm2-135m-instruct --draft runs/demo/draft --out runs/demo
