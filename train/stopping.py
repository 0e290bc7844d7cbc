"""When a run ends before its last step: budgets, and a request to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from train.feed import Batches


def planned_steps(steps: int, max_tokens: int, batches: Batches) -> int:
    """Steps of the whole run: as set, or fewer where `max_tokens` supervised tokens come sooner; 0: no limit."""
    if not max_tokens:
        return steps
    tokens = 0
    for step in range(steps):
        tokens += batches.planned_tokens(step)
        if tokens >= max_tokens:
            return step + 1
    return steps


def out_of_time(accelerator: Any, seconds: float, max_minutes: float) -> bool:
    """By the clock of the slowest process, so that all stop together; 0 minutes: no limit."""
    if not max_minutes:
        return False
    mine = torch.tensor([seconds], device=accelerator.device)
    return float(accelerator.gather(mine).max()) >= 60 * max_minutes


@contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """The signals SIGTERM and SIGINT that have come; neither ends anything meanwhile, but for a second SIGINT."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread may ask for signals
        return

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
