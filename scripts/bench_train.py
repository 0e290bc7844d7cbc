#!/usr/bin/env python3
"""Training throughput and peak memory against TRL's GKD trainer, off-policy, and against what the products cost.

usage: scripts/bench_train.py [--steps 8] [--rows 8] [--micro-rows 4] [--chunk-tokens 64]
(needs `make setup` and: pip install trl)

SmolLM2 teaches a draft of its first and last layer with the whole head, forward KL, AdamW, float32; the same rows in
the same order on both sides, with the same supervised tokens (asserted). `uniform`: answers that all have 96 tokens
after 32 of prompt; `mixed`: 16 to 384 after 16 to 128. Every arm runs in a process of its own, ours and TRL's in turn,
twice; a pace is the median over steps but the first two, a peak what training takes above the two loaded models. TRL:
GKDTrainer with lmbda=0, beta=0, its own loss (it has neither packing nor a fused loss there); rows of like length are
not grouped on either side, but ours puts the rows of a step into micro-batches by length. The floor is the time of one
forward pass of the target and three of the draft at the rate of large products here, over the tokens without padding,
heads over supervised tokens alone.
The last line is one JSON object: `tokens_per_s_over_trl`, `tokens_per_s_over_trl_mixed`, `peak_over_trl`, `over_floor`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_objectives import Peak  # noqa: E402

from decode.models import load_model  # noqa: E402
from distill.batches import Schedule  # noqa: E402
from distill.build import build_lm_draft  # noqa: E402
from distill.rows import Row  # noqa: E402

TARGET, LAYERS, RATE = ROOT / "models" / "smollm2-135m-instruct", (0, -1), 1e-4
LENGTHS = {"uniform": ((32, 32), (96, 96)), "mixed": ((16, 128), (16, 384))}
SKIPPED = 2  # steps that warm up


def make_rows(lengths: str, count: int) -> list[Row]:
    """Random ids: what they say costs nothing."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = []
    for number in range(count):
        prompt, answer = (draw(*bounds) for bounds in LENGTHS[lengths])
        ids = torch.randint(10, 49000, (prompt + answer,), generator=generator).tolist()
        rows.append(Row(ids, [False] * prompt + [True] * answer, number))
    return rows


def run_ours(rows: list[Row], given: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of each step of the training loop that `distill` runs."""
    from distill.objectives import objective
    from distill.step import DistillStep
    from distill.students import LMStudent
    from distill.supply import Supply
    from distill.teacher import Teacher
    from train.hook import Measured
    from train.loop import TrainSettings, train
    from train.optim import OptimSettings
    from train.parallel import start_accelerator

    class Nothing:
        """Measures the memory, before the first step and after the last, and before the checkpoint that ends a run."""

        score = "tau"
        peak: Peak | None = None
        peak_gib = 0.0

        def measure(self) -> Measured:
            self.peak_gib = self.peak.gib() if self.peak else 0.0
            self.peak = self.peak or Peak(accelerator.device.type)
            return Measured({"tau": 0.0}, {}, [])

        def still_rises(self, before, now) -> bool:
            return True

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        accelerator = start_accelerator(given.rows // given.micro_rows, 1.0, 0, "no", None, folder)
        target = load_model(str(TARGET), "float32", device="cpu")
        draft = build_lm_draft(target.model, LAYERS).requires_grad_().to(accelerator.device)
        step = DistillStep(LMStudent(draft), objective("forward_kl"), chunk_tokens=given.chunk_tokens)
        supply = Supply(
            [[row] for row in rows], Schedule(len(rows), given.rows, 0), Teacher(target.model.to(accelerator.device)),
            given.micro_rows, accelerator,
        )  # fmt: skip
        settings = TrainSettings(
            steps=given.steps + SKIPPED, batch_rows=given.rows, micro_rows=given.micro_rows, measure_every=10**9,
            save_every=10**9, mixed_precision="no", optim=OptimSettings(learning_rate=RATE, warmup_steps=0),
        )  # fmt: skip
        hook = Nothing()
        train(accelerator, step, step.figures, supply, settings, folder, hook, lambda *_: None, step.learn)
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        paces = [row["tokens_per_s"] for row in logged if "loss" in row]
        return [supply.supervised_tokens(i) / pace for i, pace in enumerate(paces)], hook.peak_gib


def run_trl(rows: list[Row], given: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of each step of GKDTrainer on the same rows in the same order."""
    import warnings

    warnings.filterwarnings("ignore")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    def collate(items):
        longest = max(len(item["input_ids"]) for item in items)
        padded = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        batch = {
            key: torch.tensor([item[key] + [fill] * (longest - len(item[key])) for item in items])
            for key, fill in padded.items()
        }
        return batch | {"prompts": batch["input_ids"][:, :1], "prompt_attention_mask": batch["attention_mask"][:, :1]}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(perf_counter() - self.began)

    class InOrder(GKDTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    seconds: list[float] = []
    schedule = Schedule(len(rows), given.rows, 0)
    ordered = [rows[i] for step in range(given.steps + SKIPPED) for i in schedule.rows_of(step)]
    data = Dataset.from_list([
        {"input_ids": row.ids, "attention_mask": [1] * len(row.ids),
         "labels": [token if mark else -100 for token, mark in zip(row.ids, row.is_answer, strict=True)]}
        for row in ordered
    ])  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        target = load_model(str(TARGET), "float32", device="cpu")
        draft = build_lm_draft(target.model, LAYERS).requires_grad_()
        config = GKDConfig(
            output_dir=folder, lmbda=0.0, beta=0.0, temperature=1.0, max_steps=given.steps + SKIPPED,
            per_device_train_batch_size=given.micro_rows, gradient_accumulation_steps=given.rows // given.micro_rows,
            learning_rate=RATE, lr_scheduler_type="constant", optim="adamw_torch", report_to=[], save_strategy="no",
            logging_strategy="no", remove_unused_columns=False, bf16=False, use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False, disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = InOrder(
            draft, teacher_model=target.model, args=config, data_collator=collate, train_dataset=data,
            processing_class=target.tokenizer, callbacks=[Clock()],
        )  # fmt: skip
        peak = Peak("cuda" if torch.cuda.is_available() else "cpu")
        trainer.train()
        return seconds, peak.gib()


def run_one(arm: str, lengths: str, given: argparse.Namespace) -> dict:
    rows = make_rows(lengths, given.rows * (given.steps + SKIPPED))
    schedule = Schedule(len(rows), given.rows, 0)
    seconds, peak_gib = {"ours": run_ours, "trl": run_trl}[arm](rows, given)
    tokens = [sum(rows[i].supervised for i in schedule.rows_of(step)) for step in range(len(seconds))]
    paces = [count / took for count, took in zip(tokens[SKIPPED:], seconds[SKIPPED:], strict=True)]
    return {"pace": median(paces), "supervised": sum(tokens), "peak_gib": peak_gib}


def floor(lengths: str, given: argparse.Namespace) -> float:
    """Supervised tokens a second if nothing but the products of both models took time."""
    rows = make_rows(lengths, given.rows * (given.steps + SKIPPED))
    target = load_model(str(TARGET), "float32", device="cpu").model
    if torch.cuda.is_available():
        target = target.cuda()
    body = sum(p.numel() for name, p in target.model.layers.named_parameters())
    head = target.get_output_embeddings().weight.numel()
    layer = body / target.config.num_hidden_layers
    tokens, supervised = sum(len(row.ids) for row in rows), sum(row.supervised for row in rows)
    flop = 2 * (tokens * (body + 3 * len(LAYERS) * layer) + supervised * 4 * head)
    width, inner = target.config.hidden_size, target.config.intermediate_size
    left, right = torch.randn(1024, width, device=target.device), torch.randn(width, 4 * inner, device=target.device)
    seconds = []
    for _ in range(20):
        began = perf_counter()
        left @ right
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    rate = 2 * left.numel() * right.shape[1] / median(seconds)
    return supervised / (flop / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=64, help="of ours: less memory, and smaller products")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(*given.one.split(":"), given)))
        return
    common = ["--steps", str(given.steps), "--rows", str(given.rows), "--micro-rows", str(given.micro_rows)]
    common += ["--chunk-tokens", str(given.chunk_tokens)]
    runs: dict = {(arm, lengths): [] for lengths in LENGTHS for arm in ("ours", "trl")}
    for _ in range(2):
        for (arm, lengths), found in runs.items():
            command = [sys.executable, __file__, "--one", f"{arm}:{lengths}", *common]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{arm} on {lengths} chats failed:\n{done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table("chats", "arm", "supervised tokens/s", "peak above the models, GiB")
    pace, peak = {}, {}
    for key, found in runs.items():
        pace[key], peak[key] = median(one["pace"] for one in found), median(one["peak_gib"] for one in found)
        table.add_row(key[1], key[0], f"{pace[key]:.0f}", f"{peak[key]:.2f}")
    floors = {lengths: floor(lengths, given) for lengths in LENGTHS}
    for lengths, value in floors.items():
        table.add_row(lengths, "floor", f"{value:.0f}", "")
        counts = {one["supervised"] for arm in ("ours", "trl") for one in runs[arm, lengths]}
        assert len(counts) == 1, "both sides must see the same supervised tokens"
    Console().print(table)
    result = {
        "tokens_per_s_over_trl": pace["ours", "uniform"] / pace["trl", "uniform"],
        "tokens_per_s_over_trl_mixed": pace["ours", "mixed"] / pace["trl", "mixed"],
        "peak_over_trl": max(peak["ours", lengths] / peak["trl", lengths] for lengths in LENGTHS),
        "over_floor": min(pace["ours", lengths] / floors[lengths] for lengths in LENGTHS),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
