#!/usr/bin/env bash
# One GPU, a bare python3 with torch and transformers, no network, under five minutes.
# Decodes with CUDA graphs against plain decoding and takes bfloat16 distillation steps (with
# accelerate and DeepSpeed installed also ZeRO-3 and FSDP2 ones), on random models that it
# makes itself. Prints one JSON object as its last line; exit code 0 when every check holds.
# Without a GPU it runs the same checks uncompiled on the CPU, so that the script itself can be tried.
# usage: scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONPATH=.
exec "${PYTHON:-python3}" scripts/gpu_check.py
