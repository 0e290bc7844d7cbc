#!/usr/bin/env bash
# The flagship on one data-centre GPU, within ten minutes: self-prompted answers, a feature draft, acceptance, the draft
# folder in runs/gpu-flagship/draft. A bare python3 with torch and transformers, no network; the target lies in models/.
# Prints one JSON object as its last line. Options are those of scripts/gpu_flagship.py (--help).
# usage: scripts/gpu_flagship.sh [OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONPATH=. TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" scripts/gpu_flagship.py "$@"
