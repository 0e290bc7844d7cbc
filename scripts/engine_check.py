#!/usr/bin/env python3
"""Our exported drafts in engines that people serve with: vLLM (CPU build) and transformers' assisted generation.

usage: scripts/engine_check.py [--eagle3 DRAFT] [--lm DRAFT] [--engine VENV/bin/python] [--prompts N] [--tokens N]

Greedy, float32, the same prompts and γ. Each draft's text must be the engine's own plain text, and its joint acceptance
by position that of our decoder, both cut at the end of the answer: at most 0.01 apart. Prints a table; the last line is
one JSON object, kept in runs/engine-check/summary.json. Exits with 1 when a comparison fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from decode.answer import generate  # noqa: E402
from decode.chat import render_prompt  # noqa: E402
from decode.drafts.kinds import load_draft  # noqa: E402
from decode.hf import hf_generate  # noqa: E402
from decode.laws import Law  # noqa: E402
from decode.models import Loaded, load_model  # noqa: E402
from eval.suites import read_suite  # noqa: E402
from train.publish.export import export  # noqa: E402

TARGET, OUT = ROOT / "models/smollm2-135m-instruct", ROOT / "runs/engine-check"
GAMMA = 3
FARTHEST = 0.01  # allowed difference of joint acceptance at a position
TIE = 1e-3  # difference of two logits in float32 that the order of a sum may turn round

Rounds = list[tuple[int, int]]  # of an answer: tokens that a round had room for, drafted ones accepted (cut at the end)


def main() -> None:
    options = arguments()
    target = load_model(str(TARGET), "float32", "cpu")
    prompts = suite_prompts(target, options.prompts)
    plain = vllm_run(options, prompts, None)
    results = []
    for kind, draft in (("eagle3", options.eagle3), ("lm", options.lm)):
        exported = OUT / f"{kind}-vllm"
        shutil.rmtree(exported, ignore_errors=True)
        export(str(draft), exported, "vllm", str(TARGET))
        ours = our_rounds(target, exported, prompts, options.tokens)
        method = {"eagle3": "eagle3", "lm": "draft_model"}[kind]
        speculation = {"model": str(exported), "method": method, "num_speculative_tokens": GAMMA}
        run = vllm_run(options, prompts, speculation)
        results.append(
            compare(
                f"vLLM {run['version']}", kind, ours, [vllm_rounds(a, options.tokens) for a in run["answers"]],
                different(target, prompts, plain["answers"], run["answers"]),
                rate(run["answers"]) / rate(plain["answers"]),
            )
        )  # fmt: skip
        if kind == "lm":
            results.append(transformers_check(target, exported, prompts, options.tokens, ours))
    show(results)
    summary = {"gamma": GAMMA, "prompts": len(prompts), "tokens": options.tokens, "runs": results}
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary))
    sys.exit(0 if all(result["passed"] for result in results) else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eagle3", type=Path, help="feature draft (default: of `make demo`, run when missing)")
    parser.add_argument("--lm", type=Path, help="plain draft (default: a small one, trained on the demo's answers)")
    parser.add_argument("--engine", type=Path, default=ROOT / ".venv-engine/bin/python", help="Python that has vLLM")
    parser.add_argument("--prompts", type=int, default=16, help="of the suite (default: 16)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    demo = ROOT / "runs/demo"
    if not (options.eagle3 and options.lm) and not (demo / "draft").is_dir():
        subprocess.run([ROOT / "scripts/demo.sh"], check=True)
    options.eagle3 = options.eagle3 or demo / "draft"
    if options.lm is None:
        options.lm = OUT / "lm/draft"
        settings = [
            f"target={TARGET}", f"data.answers={demo / 'data/answers.jsonl'}", "data.temperature=0",
            f"cache.folder={demo / 'data/cache'}", "cache.taps=[2,15,29]", "teacher_dtype=bfloat16",
            f"output={OUT / 'lm'}", "draft.vocabulary=8192", "train.steps=120", "train.batch_rows=8",
            "train.micro_rows=8", "train.measure_every=60", "train.mixed_precision=bf16",
            "train.optim.learning_rate=1e-3",
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "distill", *settings], check=True, cwd=ROOT)
    return options


def suite_prompts(target: Loaded, number: int) -> list[list[int]]:
    """Token ids of prompts of the suite, as many of each category as of any other."""
    by_category: dict[str, list[list[int]]] = {}
    for prompt in read_suite("suite"):
        by_category.setdefault(prompt.category, []).append(render_prompt(target.tokenizer, prompt.messages))
    return [ids for row in zip(*by_category.values(), strict=False) for ids in row][:number]


def our_rounds(target: Loaded, draft: Path, prompts: list[list[int]], tokens: int) -> list[Rounds]:
    proposer, found = load_draft(target, str(draft), "float32", "cpu"), []
    for ids in prompts:
        room, rounds = tokens - 1, []
        answer = generate(target, proposer, ids, temperature=0, max_new_tokens=tokens, num_draft_tokens=GAMMA)
        for done in answer.rounds:
            rounds.append((room, done.accepted))
            room -= len(done.tokens)
        found.append(rounds)
    return found


def vllm_run(options: argparse.Namespace, prompts: list[list[int]], speculation: dict | None) -> dict:
    job, out = OUT / "job.json", OUT / "out.json"
    job.write_text(
        json.dumps(
            {
                "target": str(TARGET), "dtype": "float32", "speculation": speculation, "prompts": prompts,
                "max_tokens": options.tokens,
            }
        )
    )  # fmt: skip
    out.unlink(missing_ok=True)
    log = OUT / "vllm.log"
    with log.open("w") as stream:
        command = [options.engine, ROOT / "scripts/engine_vllm.py", job, out]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode or not out.is_file():
        sys.exit("vLLM did not run; its last words:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    return json.loads(out.read_text())


def vllm_rounds(answer: dict, tokens: int) -> Rounds:
    """vLLM counts what a last round accepted beyond the end of the answer; we do not."""
    emitted = answer["emitted"][1:]  # the first is prefill's
    before_last = sum(count - 1 for count in emitted[:-1])
    accepted = [count - 1 for count in emitted[:-1]] + [
        min(answer["accepted"] - before_last, count) for count in emitted[-1:]
    ]
    rooms = [tokens - 1 - sum(emitted[:i]) for i in range(len(emitted))]
    return list(zip(rooms, accepted, strict=True))


def transformers_check(target: Loaded, draft: Path, prompts: list[list[int]], tokens: int, ours: list[Rounds]) -> dict:
    assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    assistant.generation_config.num_assistant_tokens = GAMMA
    matches: list[int] = []

    def count(self: object, input_ids: object, scores: object, num_matches: int) -> None:
        matches.append(int(num_matches))

    theirs, differing, seconds = [], 0, [0.0, 0.0]
    for prompt in prompts:
        # Our first round comes after prefill's token, transformers' at once: so that token goes into its prompt.
        first = generate(target, None, prompt, temperature=0, max_new_tokens=1).token_ids
        if first[0] in target.eos_ids:
            continue
        ids = prompt + first
        with mock.patch.object(AssistedCandidateGenerator, "update_candidate_strategy", count):
            matches.clear()
            texts = []
            for i, extra in enumerate(({}, {"assistant_model": assistant})):
                began = perf_counter()
                texts += hf_generate(target.model, [ids], Law(temperature=0), tokens - 1, target.eos_ids, 0, **extra)
                seconds[i] += perf_counter() - began
        differing += texts[0] != texts[1]
        left, rounds = tokens - 1, []
        for accepted in matches:
            rounds.append((left, min(accepted, left)))
            left -= accepted + 1
        theirs.append(rounds)
    return compare(f"transformers {transformers.__version__}", "lm", ours, theirs, differing, seconds[0] / seconds[1])


def different(target: Loaded, prompts: list[list[int]], plain: list[dict], drafted: list[dict]) -> int:
    """Answers that differ where the target's two best logits are no near-tie."""
    found = 0
    for ids, one, other in zip(prompts, plain, drafted, strict=True):
        a, b = one["tokens"], other["tokens"]
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:
            found += len(a) != len(b)
            continue
        with torch.no_grad():
            logits = target.model(torch.tensor([ids + a[:at]])).logits[0, -1]
        found += bool((logits[a[at]] - logits[b[at]]).abs() > TIE)
    return found


def rate(answers: Sequence[dict]) -> float:
    """Tokens per second after prefill."""
    return sum(len(a["tokens"]) - 1 for a in answers) / sum(a["decode_s"] for a in answers)


def joint(answers: list[Rounds]) -> list[float]:
    """A_1..A_γ over rounds that had room for a whole block and the target's own token."""
    accepted = [count for rounds in answers for room, count in rounds if room > GAMMA]
    return [sum(count >= j for count in accepted) / len(accepted) for j in range(1, GAMMA + 1)]


def compare(engine: str, kind: str, ours: list[Rounds], theirs: list[Rounds], different: int, speedup: float) -> dict:
    here, there = joint(ours), joint(theirs)
    gap = max(abs(a - b) for a, b in zip(here, there, strict=True))
    return {
        "engine": engine, "kind": kind, "joint_ours": here, "joint_engine": there, "largest_gap": gap,
        "different_answers": different, "speedup_in_engine": speedup, "passed": gap <= FARTHEST and not different,
    }  # fmt: skip


def show(results: list[dict]) -> None:
    table = Table("engine", "draft", "A_j, ours", "A_j, engine", "largest gap", "answers that differ", "S in it", "")
    for result in results:
        sides = [" ".join(f"{value:.3f}" for value in result[side]) for side in ("joint_ours", "joint_engine")]
        table.add_row(
            result["engine"], result["kind"], *sides, f"{result['largest_gap']:.4f}", str(result["different_answers"]),
            f"{result['speedup_in_engine']:.2f}", "passed" if result["passed"] else "FAILED",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
