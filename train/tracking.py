"""Where the numbers of a run go: metrics.jsonl always, a progress bar, and wandb when it is asked for."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from configs.errors import UserError
from configs.files import write_text


class Tracker:
    """Logs from the main process; elsewhere every call does nothing. A context manager (it owns the bar)."""

    def __init__(self, accelerator: Any, path: Path, steps: int, resumed_step: int, with_wandb: bool) -> None:
        self._accelerator = accelerator if with_wandb else None
        self._console = Console(stderr=True)
        self._file = None
        self._bar: Progress | None = None
        if accelerator.is_main_process:
            _drop_after(path, resumed_step if resumed_step else -1)
            self._file = path.open("a", encoding="utf-8")
            columns = (
                TextColumn("distil"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("", total=steps, completed=resumed_step)

    def __enter__(self) -> "Tracker":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        if self._file:
            self._file.close()

    def log(self, step: int, values: dict[str, float], headline: str) -> None:
        """Record the values of a finished step; `headline` stands beside the progress bar."""
        if self._file and self._bar:
            self._file.write(json.dumps({"step": step} | values) + "\n")
            self._file.flush()
            self._bar.update(self._task, completed=step, description=headline)
        if self._accelerator:
            self._accelerator.log(values, step=step)

    def say(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._file:
            self._console.print(line, highlight=False)


def check_tracker(name: str) -> None:
    """Raises UserError when a tracker is asked for that is not installed."""
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError("train.tracker=wandb needs wandb; install it with: pip install 'draftsmith[wandb]'")


def start_wandb(accelerator: Any, config: dict[str, Any]) -> None:
    """Open a wandb run through accelerate. Without a key or a mode it is kept offline, and says so."""
    from wandb.errors import Error

    if "WANDB_MODE" not in os.environ and "WANDB_API_KEY" not in os.environ and not (Path.home() / ".netrc").exists():
        os.environ["WANDB_MODE"] = "offline"
        if accelerator.is_main_process:
            print("wandb: no API key, the run is kept offline (wandb sync sends it later)", file=sys.stderr)
    try:
        accelerator.init_trackers("draftsmith", config=config)
    except Error as error:
        print(f"wandb: {error}; training goes on without it", file=sys.stderr)


def _drop_after(path: Path, step: int) -> None:
    """Forget what a killed run logged after the checkpoint that is resumed: those steps come again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    write_text(path, "".join(line + "\n" for line in lines))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")  # a line cut off by the kill
