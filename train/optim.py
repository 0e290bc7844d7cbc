"""Optimiser and learning rate. The rate is a function of the step alone, so it cannot run ahead or be lost."""

import math
from typing import Any

import torch
from pydantic import Field
from torch import nn

from configs.settings import StrictSettings


class OptimSettings(StrictSettings):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate.")
    final_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end ÷ peak.")
    warmup_steps: int = Field(20, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.01, ge=0, description="On matrices only, not on norms and biases.")
    beta2: float = Field(0.95, gt=0, lt=1, description="Decay of the second moment.")
    clip_norm: float = Field(1.0, gt=0, description="Largest norm of the gradient of a step.")


def build_optimizer(module: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters of `module`."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.beta2), eps=1e-8)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """The rate of step `step` (0-based) out of `steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.learning_rate * (settings.final_ratio + (1 - settings.final_ratio) * cosine)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the rate of every parameter group, also of an optimiser that accelerate or DeepSpeed has wrapped."""
    for group in optimizer.param_groups:
        group["lr"] = rate
