"""The training loop. The module, the batches and the measuring hook are arguments."""

import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from configs.errors import UserError
from configs.settings import StrictSettings
from train.checkpoint import Progress, load_checkpoint, save_checkpoint
from train.feed import Batches
from train.hook import Hook
from train.optim import OptimSettings, build_optimizer, learning_rate, set_learning_rate
from train.stopping import out_of_time, planned_steps, requests_to_stop
from train.tracking import Tracker, TrackerName

FP16_SEARCH = 20  # steps that fp16 may skip on top, while its scale comes down from 2^16


class TrainSettings(StrictSettings):
    """How long and in what portions to train."""

    steps: int = Field(200, ge=1, description="Optimiser steps.")
    max_tokens: int = Field(
        0,
        ge=0,
        description="End, learning rate and all, with the step that reaches so many supervised tokens; 0: no limit.",
    )
    max_minutes: float = Field(
        0, ge=0, description="Stop after so many minutes of training, those before a resume included; 0: no limit."
    )
    patience: int = Field(
        0,
        ge=0,
        description="Stop when the score has not risen, beyond its interval, over so many measurements; 0: never.",
    )
    batch_rows: int = Field(16, ge=1, description="Rows per step over all processes together.")
    micro_rows: int = Field(4, ge=1, description="Rows per forward pass of one process.")
    measure_every: int = Field(50, ge=1, description="Steps between acceptance measurements; the best one is kept.")
    save_every: int = Field(50, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(1, ge=1, description="Checkpoints kept while the run lasts.")
    skipped_steps: int = Field(
        3,
        ge=0,
        description="Steps in a row that may be skipped for a gradient that is not finite; one more ends the run.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Keep no activations of the draft's layers, make them anew in the backward pass: less memory.",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = Field(
        None,
        description="bf16 or, on accelerators, fp16: products in half precision, weights and losses in float32. "
        "Default: as launched.",
    )
    tracker: TrackerName = Field("none", description="metrics.jsonl is always written; a tracker's copy on top.")
    optim: OptimSettings = OptimSettings()


def train(
    accelerator: Any, module: nn.Module, figures: Sequence[str], batches: Batches, settings: TrainSettings,
    folder: Path, hook: Hook, keep_best: Callable[[Progress, Mapping[str, float]], None],
    learn: Callable[[Sequence[float]], None],
) -> Progress:  # fmt: skip
    """Train `module`, whose forward returns the summed loss over a micro-batch's supervised tokens, and a sum and a
    count for each of the named `figures` [figures, 2]; `learn` is told their means over each step of all processes.

    Every `measure_every` steps, before the first and after the last, the hook measures on every process; when its
    score is the best so far, `keep_best` is called on the main process. Resumes from the newest complete checkpoint in
    FOLDER/checkpoints. On SIGTERM or SIGINT a checkpoint is written and SystemExit(128 + the signal) raised. Raises
    UserError when too many steps in a row have a gradient that is not finite.
    """
    prepared, optimizer = accelerator.prepare(module, build_optimizer(module, settings.optim))
    checkpoints = folder / "checkpoints"
    progress = load_checkpoint(accelerator, checkpoints)
    if progress.means:
        learn(progress.means)
    steps = planned_steps(settings.steps, settings.max_tokens, batches)
    began, seconds_before, saved = perf_counter(), progress.seconds, progress.step
    with (
        requests_to_stop() as signals,
        Tracker(accelerator, folder / "metrics.jsonl", steps, progress.step, settings.tracker != "none") as tracker,
    ):
        if progress.step:
            tracker.say(f"resuming after step {progress.step}")
            if progress.threads != torch.get_num_threads():
                tracker.say(f"the run began with {progress.threads} threads: results agree to rounding, not to the bit")
        while True:
            # What is due comes before the next step, so that a run that was stopped there does it when it goes on.
            if _is_over(progress, steps, settings) or progress.step % settings.measure_every == 0:
                _measure(accelerator, progress, hook, keep_best, settings.patience, tracker)
            over = _is_over(progress, steps, settings)
            if progress.step > saved and (over or progress.step % settings.save_every == 0):
                save_checkpoint(accelerator, checkpoints, progress, settings.keep_checkpoints)
                saved = progress.step
            if over:
                return progress
            step_began = perf_counter()
            rate = learning_rate(progress.step, steps, settings.optim)
            values, stops = _step(accelerator, prepared, optimizer, batches, settings, progress, rate, signals, figures)
            learn(progress.means)
            values["tokens_per_s"] = batches.supervised_tokens(progress.step - 1) / (perf_counter() - step_began)
            tracker.log(progress.step, values, _headline(values, progress, hook.score))
            progress.seconds = seconds_before + perf_counter() - began
            progress.stopped = progress.stopped or out_of_time(accelerator, progress.seconds, settings.max_minutes)
            if stops:
                save_checkpoint(accelerator, checkpoints, progress, settings.keep_checkpoints)
                tracker.say(f"asked to stop: saved after step {progress.step}; the same command goes on from there")
                raise SystemExit(128 + (signals[0] if signals else signal.SIGTERM))


def _is_over(progress: Progress, steps: int, settings: TrainSettings) -> bool:
    enough = bool(settings.max_tokens) and progress.tokens >= settings.max_tokens
    return progress.stopped or enough or progress.step >= steps


def _step(
    accelerator: Any, module: nn.Module, optimizer: Any, batches: Batches, settings: TrainSettings, progress: Progress,
    rate: float, signals: list[int], figures: Sequence[str],
) -> tuple[dict[str, float], bool]:  # fmt: skip
    """One optimiser step: the gradient of the mean loss over the supervised tokens of all processes.

    Also whether any process was asked to stop.
    """
    set_learning_rate(optimizer, rate)
    tokens = batches.supervised_tokens(progress.step)
    micro_batches = batches.micro_batches(progress.step)
    # accelerate and DeepSpeed divide by the number of micro-batches and average over processes: undo both.
    scale = accelerator.num_processes * len(micro_batches) / tokens
    total, sums = torch.zeros((), device=accelerator.device), torch.zeros((), device=accelerator.device)
    norm = 0.0
    module.train()
    for inputs in micro_batches:
        with accelerator.accumulate(module):
            with accelerator.autocast():  # FSDP2 brings none of its own
                loss, measured = module(**inputs)
            accelerator.backward(loss * scale)
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(module.parameters(), settings.optim.clip_norm) or 0.0)
            # DeepSpeed leaves such a step out by itself, and fp16's scaler does, which learns from it.
            if isfinite(norm) or accelerator.scaler is not None:
                optimizer.step()
            optimizer.zero_grad()
        total = total + loss.detach()
        sums = sums + measured.detach()
    said = torch.stack([total.double(), torch.tensor(float(bool(signals)), device=total.device)])
    loss_sum, asked = accelerator.reduce(said, reduction="sum").tolist()
    sums = accelerator.reduce(sums, reduction="sum")
    progress.step += 1
    values = {"loss": loss_sum / tokens, "learning_rate": rate, "gradient_norm": norm}
    if isfinite(norm):
        progress.skipped_in_a_row = 0
        progress.tokens += tokens
        progress.means = [sum_ / max(1.0, count) for sum_, count in sums.tolist()]
        values |= dict(zip(figures, progress.means, strict=True))
    else:
        _skip(progress, settings.skipped_steps, values["loss"], accelerator.mixed_precision == "fp16")
    values |= {"tokens": progress.tokens, "skipped_steps": progress.skipped, "memory_gib": _peak_gib(accelerator)}
    return values, bool(asked)


def _skip(progress: Progress, allowed: int, loss: float, is_fp16: bool) -> None:
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    allowed += FP16_SEARCH if is_fp16 else 0
    if progress.skipped_in_a_row > allowed:
        raise UserError(
            f"step {progress.step}: the loss is {loss} and the gradient is not finite, for the "
            f"{progress.skipped_in_a_row}. time in a row ({allowed} are allowed, train.skipped_steps); "
            "lower train.optim.learning_rate or train.optim.clip_norm"
        )


def _measure(
    accelerator: Any, progress: Progress, hook: Hook, keep_best: Callable[[Progress, Mapping[str, float]], None],
    patience: int, tracker: Tracker,
) -> None:  # fmt: skip
    """Unless it was done after this step already: measure, keep the best, and see whether the score still rises."""
    if progress.measured_step == progress.step:
        return
    values, samples, evidence = hook.measure()
    score, progress.measured_step = values[hook.score], progress.step
    if progress.best_score is None or score > progress.best_score:
        progress.best_score, progress.best_step = score, progress.step
        if accelerator.is_main_process:
            keep_best(progress, values)
        accelerator.wait_for_everyone()
    named = {f"held_out/{name}": value for name, value in values.items()}
    tracker.log(progress.step, named, f"{hook.score} {score:.3f}")
    tracker.show(progress.step, samples)
    tracker.say(f"step {progress.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    if patience:
        progress.evidence = [*progress.evidence, evidence][-patience - 1 :]
        if len(progress.evidence) > patience and not hook.still_rises(progress.evidence[0], evidence):
            tracker.say(f"{hook.score} has not risen over {patience} measurements: stopping early")
            progress.stopped = True


def _peak_gib(accelerator: Any) -> float:
    """Memory of this process: on the accelerator, or resident."""
    if accelerator.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(accelerator.device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _headline(values: Mapping[str, float], progress: Progress, score: str) -> str:
    alpha = f" · α {values['alpha_1']:.3f}" if "alpha_1" in values else ""
    best = f" · best {score} {progress.best_score:.3f}" if progress.best_score is not None else ""
    return f"loss {values['loss']:.3f}{alpha} · {values['tokens_per_s']:.0f} tokens/s{best}"
