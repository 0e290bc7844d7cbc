"""The training loop. The module, the batches and the measuring hook are arguments."""

from collections.abc import Callable, Mapping, Sequence
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
from train.optim import OptimSettings, build_optimizer, learning_rate, set_learning_rate
from train.tracking import Tracker


class TrainSettings(StrictSettings):
    """How long and in what portions to train."""

    steps: int = Field(200, ge=1, description="Optimiser steps.")
    batch_rows: int = Field(16, ge=1, description="Rows per step over all processes together.")
    micro_rows: int = Field(4, ge=1, description="Rows per forward pass of one process.")
    measure_every: int = Field(50, ge=1, description="Steps between acceptance measurements; the best one is kept.")
    save_every: int = Field(50, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(1, ge=1, description="Checkpoints kept while the run lasts.")
    mixed_precision: Literal["no", "bf16"] | None = Field(
        None, description="bf16: products in half precision, weights and losses in float32. Default: as launched."
    )
    tracker: Literal["none", "wandb"] = Field("none", description="metrics.jsonl is always written; wandb on top.")
    optim: OptimSettings = OptimSettings()


class Batches(Protocol):
    """The rows of a step are a function of the step, so a resumed run sees the same ones."""

    def micro_batches(self, step: int) -> list[dict[str, Any]]:
        """Inputs of the module for each forward pass of this process in step `step`; equally many everywhere."""
        ...

    def supervised_tokens(self, step: int) -> int:
        """Supervised tokens of step `step` over all processes together: what its loss is divided by."""
        ...


Measure = Callable[[], dict[str, float]]


def train(
    accelerator: Any, module: nn.Module, batches: Batches, settings: TrainSettings, folder: Path,
    measure: Measure, score: str, keep_best: Callable[[Progress, Mapping[str, float]], None],
    learn: Callable[[Sequence[float]], None],
) -> Progress:  # fmt: skip
    """Train `module`, whose forward returns the summed loss over a micro-batch's supervised tokens, and sums and counts
    [K, 2] of K quantities. `learn` is told their means over each optimiser step of all processes.

    Every `measure_every` steps, before the first and after the last, `measure` runs on every process; when its
    value named `score` is the best so far, `keep_best` is called on the main process. Resumes from the newest
    complete checkpoint in FOLDER/checkpoints. Raises UserError when the loss is not finite.
    """
    prepared, optimizer = accelerator.prepare(module, build_optimizer(module, settings.optim))
    checkpoints = folder / "checkpoints"
    progress = load_checkpoint(accelerator, checkpoints)
    if progress.means:
        learn(progress.means)
    with_wandb = settings.tracker == "wandb"
    with Tracker(accelerator, folder / "metrics.jsonl", settings.steps, progress.step, with_wandb) as tracker:
        if progress.step:
            tracker.say(f"resuming after step {progress.step}")
        else:
            _measure(accelerator, progress, measure, score, keep_best, tracker)
        while progress.step < settings.steps:
            began = perf_counter()
            values = _step(accelerator, prepared, optimizer, batches, settings, progress)
            learn(progress.means)
            tokens = batches.supervised_tokens(progress.step - 1)
            values["tokens_per_s"] = tokens / (perf_counter() - began)
            tracker.log(progress.step, values, _headline(values, progress, score))
            last = progress.step == settings.steps
            if last or progress.step % settings.measure_every == 0:
                _measure(accelerator, progress, measure, score, keep_best, tracker)
            if last or progress.step % settings.save_every == 0:
                save_checkpoint(accelerator, checkpoints, progress, settings.keep_checkpoints)
    return progress


def _step(
    accelerator: Any,
    module: nn.Module,
    optimizer: Any,
    batches: Batches,
    settings: TrainSettings,
    progress: Progress,
) -> dict[str, float]:
    """One optimiser step: the gradient of the mean loss over the supervised tokens of all processes."""
    rate = learning_rate(progress.step, settings.steps, settings.optim)
    set_learning_rate(optimizer, rate)
    tokens = batches.supervised_tokens(progress.step)
    micro_batches = batches.micro_batches(progress.step)
    # accelerate and DeepSpeed divide by the number of micro-batches and average over processes: undo both.
    scale = accelerator.num_processes * len(micro_batches) / tokens
    total, sums = torch.zeros((), device=accelerator.device), torch.zeros((), device=accelerator.device)
    module.train()
    for inputs in micro_batches:
        with accelerator.accumulate(module):
            loss, measured = module(**inputs)
            accelerator.backward(loss * scale)
            norm = accelerator.clip_grad_norm_(module.parameters(), settings.optim.clip_norm) \
                if accelerator.sync_gradients else None  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()
        total = total + loss.detach()
        sums = sums + measured.detach()
    mean_loss = float(accelerator.reduce(total, reduction="sum")) / tokens
    gradient_norm = float(norm or 0.0)
    if not (isfinite(mean_loss) and isfinite(gradient_norm)):
        raise UserError(
            f"step {progress.step + 1}: the loss is {mean_loss} and the gradient's norm {gradient_norm}; "
            "lower train.optim.learning_rate"
        )
    progress.step += 1
    progress.tokens += tokens
    progress.means = [sum_ / max(1.0, count) for sum_, count in accelerator.reduce(sums, reduction="sum").tolist()]
    return {
        "loss": mean_loss,
        **{f"alpha_{number}": mean for number, mean in enumerate(progress.means, start=1)},
        "learning_rate": rate,
        "gradient_norm": gradient_norm,
        "tokens": progress.tokens,
    }


def _measure(
    accelerator: Any, progress: Progress, measure: Measure, score: str,
    keep_best: Callable[[Progress, Mapping[str, float]], None], tracker: Tracker,
) -> None:  # fmt: skip
    values = measure()
    if progress.best_score is None or values[score] > progress.best_score:
        progress.best_score, progress.best_step = values[score], progress.step
        if accelerator.is_main_process:
            keep_best(progress, values)
        accelerator.wait_for_everyone()
    named = {f"held_out/{name}": value for name, value in values.items()}
    tracker.log(progress.step, named, f"{score} {values[score]:.3f}")
    tracker.say(f"step {progress.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))


def _headline(values: Mapping[str, float], progress: Progress, score: str) -> str:
    return f"loss {values['loss']:.3f} · {values['tokens_per_s']:.0f} tokens/s · best {score} {progress.best_score:.3f}"
