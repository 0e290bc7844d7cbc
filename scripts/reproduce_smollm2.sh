#!/usr/bin/env bash
# Every table of docs/results.md on drafts for SmolLM2-135M-Instruct, from nothing. What is there already is reused, a
# killed run goes on where it was, and no single run takes more than two hours on two cores.
# usage: scripts/reproduce_smollm2.sh [flagship|kinds|objectives|shapes|verification|reach|precision|lookup]...
# (default: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
target=models/smollm2-135m-instruct

data() {
    draftsmith data --config configs/smollm2-eagle3.yaml
    draftsmith data cache --config configs/smollm2-eagle3.yaml --yes
}

measure() { # DRAFT OUT PROMPTS [OPTIONS]: prompts of the suite, 64 tokens each
    local draft=$1 out=$2 prompts=$3
    shift 3
    draftsmith eval --target $target --draft "$draft" --max-prompts "$prompts" --out "$out" "$@"
}

flagship() {
    data
    python -m distill --config configs/smollm2-eagle3.yaml
    measure runs/flagship/draft runs/flagship 128 --num-draft-tokens 2
    measure runs/flagship/draft runs/flagship-t1 64 --num-draft-tokens 2 --temperature 1
}

kinds() {
    data
    python -m distill --config configs/smollm2-lm.yaml
    measure runs/smollm2-lm/draft runs/smollm2-lm 32 --num-draft-tokens 2
    measure runs/smollm2-lm/draft runs/smollm2-lm-t1 32 --num-draft-tokens 2 --temperature 1
    scripts/compare_drafts.py configs/smollm2-eagle3.yaml eagle3=runs/flagship/draft lm=runs/smollm2-lm/draft
}

objectives() { # each with three seeds, some 200,000 tokens, one unrolled step
    data
    local names="forward_kl reverse_kl jensen_shannon total_variation negative_log_alpha hybrid" compared="" name seed
    for name in $names; do
        local drafts=""
        for seed in 0 1 2; do
            short "objective-$name-$seed" objective.name="$name" seed=$seed draft.unroll_steps=1
            drafts+=",runs/short/objective-$name-$seed/draft"
        done
        compared+=" $name=${drafts#,}"
    done
    # shellcheck disable=SC2086
    scripts/compare_drafts.py configs/smollm2-eagle3.yaml $compared
}

shapes() { # size of the head and unrolled steps, some 200,000 tokens each
    data
    draftsmith data vocabulary --config configs/smollm2-eagle3.yaml --sizes 4096,8192,16384,32768,49152
    local size steps
    for size in 4096 8192 16384 0; do
        short "vocabulary-$size" draft.vocabulary=$size
        measure "runs/short/vocabulary-$size/draft" "runs/short/vocabulary-$size" 16 --num-draft-tokens 2
    done
    for steps in 1 2; do short "unroll-$steps" draft.unroll_steps=$steps; done
    scripts/compare_drafts.py configs/smollm2-eagle3.yaml 3=runs/short/vocabulary-8192/draft \
        2=runs/short/unroll-2/draft 1=runs/short/unroll-1/draft
}

verification() { # token against block at T = 0.7 and 1, the flagship
    local temperature rule
    for temperature in 0.7 1; do
        for rule in token block; do
            measure runs/flagship/draft "runs/verification-$temperature-$rule" 24 --num-draft-tokens 3 \
                --temperature $temperature --verifier $rule
        done
    done
}

reach() { # batches and long texts, the flagship
    measure runs/flagship/draft runs/reach 8 --num-draft-tokens 2 --sweep-prompts 8 \
        --sweep-batches 1 --sweep-batches 2 --sweep-batches 4 --sweep-batches 8 --sweep-batches 16 \
        --sweep-contexts 512 --sweep-contexts 1024 --sweep-contexts 2048 --sweep-contexts 4096 --sweep-contexts 8100
}

precision() { # target and draft in fewer bits, the flagship; the libraries are there for this alone
    pip install --quiet --no-deps "torchao>=0.18" "bitsandbytes>=0.49"
    local of_target of_draft options
    for of_target in bf16 int8 nf4; do
        for of_draft in bf16 int8; do
            options=()
            if [ $of_target != bf16 ]; then options+=(--quantize-target $of_target); fi
            if [ $of_draft != bf16 ]; then options+=(--quantize-draft $of_draft); fi
            measure runs/flagship/draft "runs/precision-$of_target-$of_draft" 8 --num-draft-tokens 2 --max-new-tokens 48 \
                --lookup-prompts 0 "${options[@]}"
        done
    done
    pip uninstall --quiet --yes torchao bitsandbytes
}

lookup() { # drafts without training, alone and beside the flagship
    measure lookup runs/lookup 32 --num-draft-tokens 4
    measure lookup+runs/flagship/draft runs/lookup-flagship 32 --num-draft-tokens 3
    measure lookup+runs/flagship/draft runs/lookup-flagship-t1 32 --num-draft-tokens 3 --temperature 1
}

short() { # NAME OVERRIDES: a run of the flagship's recipe at a small budget
    local name=$1
    shift
    python -m distill --config configs/smollm2-eagle3.yaml "output=runs/short/$name" train.steps=150 \
        train.measure_every=150 train.save_every=150 "$@"
}

if [ $# -eq 0 ]; then set -- flagship kinds objectives shapes verification reach precision lookup; fi
for part in "$@"; do "$part"; done
