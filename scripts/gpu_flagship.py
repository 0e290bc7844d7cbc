"""What scripts/gpu_flagship.sh runs: it needs torch and transformers, nothing else, and a target on disk.

Self-prompted answers, a feature draft trained with the target beside it, acceptance on held-out answers, and the draft
folder. Every part has its share of the minutes that are given.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import torch

from decode.chat import encode_text, render_prompt, user_turn_opening
from decode.drafts.eagle3 import Eagle3Draft
from decode.generation import Settings, device_clock, generate_ids
from decode.hf import hf_generate
from decode.laws import Law
from decode.models import load_model
from decode.stops import Stops
from distill.batches import Schedule, collate
from distill.build import build_eagle3_draft, save_draft
from distill.calibration import fit_temperatures, store_temperatures
from distill.measuring import AcceptanceHook
from distill.objectives import objective
from distill.rows import Row, split_held_out
from distill.step import DistillStep
from distill.students import Eagle3Student
from distill.teacher import Teacher
from distill.vocabulary import choose_ids, count_tokens, coverage, kept_always

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CLOCK = device_clock(DEVICE)
ALONE = SimpleNamespace(process_index=0, num_processes=1, device=DEVICE, reduce=lambda sums, reduction: sums)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="models/smollm2-135m-instruct", help="folder of the target")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-flagship"), help="folder of the results")
    parser.add_argument("--data-minutes", type=float, default=3.0, help="time for answers")
    parser.add_argument("--train-minutes", type=float, default=4.0, help="time for training")
    parser.add_argument("--rows", type=int, default=1024 if ON_GPU else 4, help="answers sampled at a time")
    parser.add_argument("--batch-rows", type=int, default=96 if ON_GPU else 2, help="rows per training step")
    parser.add_argument("--answer-tokens", type=int, default=160, help="tokens of an answer at most")
    parser.add_argument("--held-out", type=int, default=128 if ON_GPU else 4, help="rows kept back to measure on")
    parser.add_argument("--vocabulary", type=int, default=8192, help="ids in the draft's head")
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak; it follows the share of the time used")
    return parser.parse_args()


def write_rows(target, asked, path: Path) -> list[Row]:
    """User turns that the target writes, each answered at T = 1 and greedily, until the time is up."""
    began, rows, number = perf_counter(), [], 0
    opening = encode_text(target.tokenizer, user_turn_opening(target.tokenizer))
    with path.open("w", encoding="utf-8") as file:
        while perf_counter() - began < 60 * asked.data_minutes or not rows:
            law, count = Law(1.0, top_p=0.95), asked.rows
            turns = hf_generate(target.model, [opening] * count, law, 48, target.eos_ids, number, whole_law=True)
            texts = [target.tokenizer.decode(turn, skip_special_tokens=True).strip().split("\n")[0] for turn in turns]
            prompts = [render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in texts if text]
            for law in (Law(1.0), Law(0.0)):
                answers = hf_generate(target.model, prompts, law, asked.answer_tokens, target.eos_ids, number)
                for prompt, answer in zip(prompts, answers, strict=True):
                    marks = [False] * len(prompt) + [True] * len(answer)
                    rows.append(Row(prompt + answer, marks, len(rows), greedy=law.is_greedy))
                    file.write(json.dumps({"prompt_ids": prompt, "answer_ids": answer, "greedy": law.is_greedy}) + "\n")
            number += 1
            say(f"{len(rows)} answers, {sum(row.supervised for row in rows)} tokens", began)
    return rows


def train(step, teacher, rows, asked, began_all) -> tuple[int, int]:
    """AdamW over shuffled rows until the time is up; the learning rate falls with it. (steps, supervised tokens)."""
    matrices = [p for p in step.parameters() if p.ndim >= 2]
    vectors = [p for p in step.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule, began, number, seen = Schedule(len(rows), asked.batch_rows, 0), perf_counter(), 0, 0
    while (used := (perf_counter() - began) / (60 * asked.train_minutes)) < 1:
        rate = asked.learning_rate * min(1.0, (number + 1) / 50) * (1 - 0.9 * used)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = collate([[rows[i]] for i in schedule.rows_of(number)], DEVICE)
        tokens = int(batch.predicts.sum())
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            last, tapped = teacher.read(batch.ids, batch.predicts, taps=step.student.model.taps)
            loss, sums = step(
                {"hidden": last, "head": teacher.head_weight}, ids=batch.ids, predicts=batch.predicts, tapped=tapped,
                embedded=teacher.embedded(batch.ids),
            )  # fmt: skip
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 0:
            means = (sums[:, 0] / sums[:, 1]).tolist()
            step.learn(means)
            alphas = means[: step.student.steps]
            say(f"step {number}: loss {float(loss) / tokens:.3f}, α {[round(alpha, 3) for alpha in alphas]}", began_all)
        number, seen = number + 1, seen + tokens
    return number, seen


def pace(target, draft, rows) -> dict[str, float]:
    """Greedy decoding of held-out prompts in the target's dtype: tokens a second, plain and speculative, and τ."""
    prompts = [row.ids[: row.is_answer.index(True)] for row in rows if row.greedy][:16]
    found, settings = {}, Settings(Law(0.0), 96, 4, Stops(target.eos_ids))
    for name, arm in (("plain", None), ("speculative", draft)):
        answers = [generate_ids(target.model, arm, prompt, settings) for prompt in prompts]
        decoded = sum(len(answer.token_ids) - 1 for answer in answers)
        found[f"{name}_tokens_per_s"] = decoded / sum(answer.decode_s for answer in answers)
        found[f"{name}_tau"] = decoded / max(1, sum(len(answer.rounds) for answer in answers))
    return found


def say(text: str, began: float) -> None:
    print(f"{perf_counter() - began:6.0f} s  {text}", file=sys.stderr, flush=True)


def main() -> None:
    asked, began = arguments(), perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    target = load_model(asked.target, "bfloat16" if ON_GPU else "float32")
    rows, held_out = split_held_out(write_rows(target, asked, asked.out / "rows.jsonl"), asked.held_out, 0)
    counts = count_tokens(rows, target.model.config.vocab_size)
    ids = choose_ids(counts, asked.vocabulary, kept_always(target, counts), len(target.tokenizer))
    depth = target.model.config.num_hidden_layers
    draft = build_eagle3_draft(target.model, (min(2, depth), depth // 2, depth - 1), ids, 0).to(DEVICE)
    teacher, drafter = Teacher(target.model), Eagle3Draft(draft, target.model.get_input_embeddings())
    student = Eagle3Student(draft, asked.steps)
    step = DistillStep(student, objective("hybrid"), chunk_tokens=2048 if ON_GPU else 64, head_ids=draft.draft_ids)

    def acceptance(greedy: bool) -> dict[str, float]:
        law = Law(0.0 if greedy else 1.0, vocabulary=target.vocabulary)
        some = [row for row in held_out if row.greedy == greedy]
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return AcceptanceHook(drafter, teacher, some, law, 4, target.eos_ids, ALONE).measure().values

    before = {"t0": acceptance(True), "t1": acceptance(False)}
    steps, seen = train(step, teacher, rows, asked, began)
    draft.eval()
    after = {"t0": acceptance(True), "t1": acceptance(False)}
    result = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "rows": len(rows),
        "supervised_tokens": sum(row.supervised for row in rows), "steps": steps, "supervised_tokens_seen": seen,
        "coverage": coverage(counts, ids), "before": before, "after": after,
    }  # fmt: skip
    save_draft(draft, target, "eagle3", result, asked.out / "draft")
    drafter = Eagle3Draft(draft.to(target.model.dtype), target.model.get_input_embeddings())
    sampled = [row for row in rows if not row.greedy][:64]
    store_temperatures(fit_temperatures(drafter, teacher, sampled, Law(1.0), DEVICE), asked.out / "draft")
    result |= pace(target, drafter, held_out) | {"seconds": perf_counter() - began}
    (asked.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
