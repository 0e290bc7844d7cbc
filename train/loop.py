"""The training loop. The module, the batches and the measuring hook are arguments."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import nn

from configs.errors import UserError
from configs.settings import StrictSettings
from train.checkpoint import Progress, load_checkpoint, save_checkpoint
from train.hook import Hook
from train.optim import OptimSettings, build_optimizer, learning_rate, set_learning_rate
from train.tracking import Tracker, TrackerName

TERMINATED = 143  # exit code of a run that SIGTERM ended, as a shell counts it


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


class Batches(Protocol):
    """The rows of a step are a function of the step, so a resumed run sees the same ones."""

    def micro_batches(self, step: int) -> list[dict[str, Any]]:
        """Inputs of the module for each forward pass of this process in step `step`; equally many everywhere."""
        ...

    def supervised_tokens(self, step: int) -> int:
        """Supervised tokens of step `step` over all processes together: what its loss is divided by."""
        ...

    def planned_tokens(self, step: int) -> int:
        """The same as far as it is known before the run has come there."""
        ...


def train(
    accelerator: Any, module: nn.Module, figures: Sequence[str], batches: Batches, settings: TrainSettings,
    folder: Path, hook: Hook, keep_best: Callable[[Progress, Mapping[str, float]], None],
    learn: Callable[[Sequence[float]], None],
) -> Progress:  # fmt: skip
    """Train `module`, whose forward returns the summed loss over a micro-batch's supervised tokens, and a sum and a
    count for each of the named `figures` [figures, 2]; `learn` is told their means over each step of all processes.

    Every `measure_every` steps, before the first and after the last, the hook measures on every process; when its
    score is the best so far, `keep_best` is called on the main process. Resumes from the newest complete checkpoint in
    FOLDER/checkpoints. On SIGTERM a checkpoint is written and SystemExit(143) raised. Raises UserError when too many
    steps in a row have a gradient that is not finite.
    """
    prepared, optimizer = accelerator.prepare(module, build_optimizer(module, settings.optim))
    checkpoints = folder / "checkpoints"
    progress = load_checkpoint(accelerator, checkpoints)
    if progress.means:
        learn(progress.means)
    steps = _steps(settings, batches)
    with (
        _terminated() as terminated,
        Tracker(accelerator, folder / "metrics.jsonl", steps, progress.step, settings.tracker != "none") as tracker,
    ):
        if progress.step:
            tracker.say(f"resuming after step {progress.step}")
            if progress.threads != torch.get_num_threads():
                tracker.say(f"the run began with {progress.threads} threads: results agree to rounding, not to the bit")
        else:
            _measure(accelerator, progress, hook, keep_best, settings.patience, tracker)
        while not progress.finished:
            began = perf_counter()
            rate = learning_rate(progress.step, steps, settings.optim)
            values, asked_to_stop = _step(
                accelerator, prepared, optimizer, batches, settings, progress, rate, terminated, figures
            )
            learn(progress.means)
            seconds = perf_counter() - began
            progress.seconds += seconds
            values["tokens_per_s"] = batches.supervised_tokens(progress.step - 1) / seconds
            tracker.log(progress.step, values, _headline(values, progress, hook.score))
            progress.finished = progress.step >= steps or _out_of_time(accelerator, settings, progress)
            if (progress.finished or progress.step % settings.measure_every == 0) and not asked_to_stop:
                _measure(accelerator, progress, hook, keep_best, settings.patience, tracker)
                if settings.patience and _has_stopped_rising(progress, hook, settings.patience):
                    tracker.say(f"{hook.score} has not risen over {settings.patience} measurements: stopping early")
                    progress.finished = True
            if progress.finished or asked_to_stop or progress.step % settings.save_every == 0:
                save_checkpoint(accelerator, checkpoints, progress, settings.keep_checkpoints)
            if asked_to_stop:
                tracker.say(f"SIGTERM: saved after step {progress.step}; the same command goes on from there")
                raise SystemExit(TERMINATED)
    return progress


def _step(
    accelerator: Any, module: nn.Module, optimizer: Any, batches: Batches, settings: TrainSettings, progress: Progress,
    rate: float, terminated: list[int], figures: Sequence[str],
) -> tuple[dict[str, float], bool]:  # fmt: skip
    """One optimiser step: the gradient of the mean loss over the supervised tokens of all processes.

    Also whether any process was told to stop.
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
    said = torch.stack([total.double(), torch.tensor(float(bool(terminated)), device=total.device)])
    loss_sum, told = accelerator.reduce(said, reduction="sum").tolist()
    sums = accelerator.reduce(sums, reduction="sum")
    progress.step += 1
    values = {"loss": loss_sum / tokens, "learning_rate": rate, "gradient_norm": norm}
    if isfinite(norm):
        progress.skipped_in_a_row = 0
        progress.tokens += tokens
        progress.means = [sum_ / max(1.0, count) for sum_, count in sums.tolist()]
    else:
        _skip(progress, settings.skipped_steps, values["loss"])
    values |= dict(zip(figures, progress.means, strict=False))  # no means before the first finite step
    values |= {
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "memory_gib": _peak_memory_gib(accelerator),
    }
    return values, bool(told)


def _skip(progress: Progress, allowed: int, loss: float) -> None:
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row > allowed:
        raise UserError(
            f"step {progress.step}: the loss is {loss} and the gradient is not finite, for the "
            f"{progress.skipped_in_a_row}. time in a row (train.skipped_steps={allowed}); "
            "lower train.optim.learning_rate or train.optim.clip_norm"
        )


def _measure(
    accelerator: Any, progress: Progress, hook: Hook, keep_best: Callable[[Progress, Mapping[str, float]], None],
    patience: int, tracker: Tracker,
) -> None:  # fmt: skip
    values, samples, evidence = hook.measure()
    score = values[hook.score]
    if patience:
        progress.evidence = [*progress.evidence, evidence][-patience - 1 :]
    if progress.best_score is None or score > progress.best_score:
        progress.best_score, progress.best_step = score, progress.step
        if accelerator.is_main_process:
            keep_best(progress, values)
        accelerator.wait_for_everyone()
    named = {f"held_out/{name}": value for name, value in values.items()}
    tracker.log(progress.step, named, f"{hook.score} {score:.3f}")
    tracker.show(progress.step, samples)
    tracker.say(f"step {progress.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))


def _has_stopped_rising(progress: Progress, hook: Hook, patience: int) -> bool:
    seen = progress.evidence
    return len(seen) > patience and not hook.still_rises(seen[0], seen[-1])


def _steps(settings: TrainSettings, batches: Batches) -> int:
    """Steps of the whole run: as set, or fewer where `max_tokens` are reached sooner."""
    if not settings.max_tokens:
        return settings.steps
    tokens = 0
    for step in range(settings.steps):
        tokens += batches.planned_tokens(step)
        if tokens >= settings.max_tokens:
            return step + 1
    return settings.steps


def _out_of_time(accelerator: Any, settings: TrainSettings, progress: Progress) -> bool:
    """By the clock of the slowest process, so that all stop together."""
    if not settings.max_minutes:
        return False
    seconds = torch.tensor(progress.seconds, device=accelerator.device)
    return float(accelerator.gather(seconds.reshape(1)).max()) >= 60 * settings.max_minutes


@contextmanager
def _terminated() -> Iterator[list[int]]:
    """A list that is not empty any more once SIGTERM has come; the signal itself ends nothing meanwhile."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread may ask for signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)


def _peak_memory_gib(accelerator: Any) -> float:
    """Of this process: on the accelerator, or resident."""
    if accelerator.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(accelerator.device)) / 2**30
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _headline(values: Mapping[str, float], progress: Progress, score: str) -> str:
    alpha = f" · α {values['alpha_1']:.3f}" if "alpha_1" in values else ""
    best = f" · best {score} {progress.best_score:.3f}" if progress.best_score is not None else ""
    return f"loss {values['loss']:.3f}{alpha} · {values['tokens_per_s']:.0f} tokens/s{best}"
