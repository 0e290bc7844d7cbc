#!/usr/bin/env bash
# The main job from start to end, on any machine: answers, signals, draft, report. What is there already is reused.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false

echo "1/4  the target answers 320 prompts"
draftsmith data --config configs/demo.yaml
echo "2/4  its log-probabilities and hidden states are kept"
draftsmith data cache --config configs/demo.yaml
echo "3/4  a feature draft learns from them"
accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    -m distill --config configs/demo.yaml
echo "4/4  what is it worth?"
draftsmith eval --target models/smollm2-135m-instruct --draft runs/demo/draft --num-draft-tokens 1 --out runs/demo
