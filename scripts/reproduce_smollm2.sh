#!/usr/bin/env bash
# Every table of docs/results.md on drafts for SmolLM2-135M-Instruct, from nothing. What is there already is reused, a
# killed run goes on where it was, and no single run takes more than two hours on two cores.
# usage: scripts/reproduce_smollm2.sh [flagship|kinds|objectives|shapes]...   (default: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
target=models/smollm2-135m-instruct

data() {
    draftsmith data --config configs/smollm2-eagle3.yaml
    draftsmith data cache --config configs/smollm2-eagle3.yaml --yes
}

measure() { # DRAFT OUT [OPTIONS]: 128 prompts of the suite, 64 tokens each
    local draft=$1 out=$2
    shift 2
    draftsmith eval --target $target --draft "$draft" --max-prompts 128 --out "$out" "$@"
}

flagship() {
    data
    python -m distill --config configs/smollm2-eagle3.yaml
    measure runs/flagship/draft runs/flagship --num-draft-tokens 3
    measure runs/flagship/draft runs/flagship-t1 --num-draft-tokens 3 --temperature 1
}

kinds() {
    data
    python -m distill --config configs/smollm2-lm.yaml
    measure runs/smollm2-lm/draft runs/smollm2-lm --num-draft-tokens 1
    measure runs/smollm2-lm/draft runs/smollm2-lm-t1 --num-draft-tokens 1 --temperature 1
}

for part in "${@:-flagship kinds}"; do
    for one in $part; do "$one"; done
done
