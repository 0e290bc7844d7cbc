"""Where the numbers of a run go: metrics.jsonl always, a progress bar, and a tracker when one is asked for."""

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

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

TrackerName = Literal["none", "wandb", "trackio", "tensorboard"]
PROJECT = "draftsmith"


class Tracker:
    """Logs from the main process; elsewhere every call does nothing. A context manager (it owns the bar).

    A tracker that fails is given up with one line; metrics.jsonl goes on.
    """

    def __init__(self, accelerator: Any, path: Path, steps: int, resumed_step: int, with_tracker: bool) -> None:
        self._accelerator = accelerator if with_tracker else None
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

    def log(self, step: int, values: Mapping[str, float], headline: str) -> None:
        """Record the values of a finished step; `headline` stands beside the progress bar."""
        if self._file and self._bar:
            known = {name: value if isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
            self._file.write(json.dumps({"step": step} | known) + "\n")
            self._file.flush()
            self._bar.update(self._task, completed=step, description=headline)
        self._pass_on(step, values)

    def show(self, step: int, samples: Mapping[str, str]) -> None:
        """Text to look at, for the tracker alone."""
        self._pass_on(step, samples)

    def say(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._file:
            self._console.print(line, highlight=False, markup=False)

    def _pass_on(self, step: int, values: Mapping[str, Any]) -> None:
        if self._accelerator and values:
            try:
                self._accelerator.log(dict(values), step=step)
            except Exception as error:  # whatever it is, it is not worth a training run
                self._accelerator = None
                self.say(f"tracker: {type(error).__name__}: {error}; training goes on without it")


def check_tracker(name: TrackerName) -> None:
    """Raises UserError when a tracker is asked for that is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"train.tracker={name} needs {name}; install it with: pip install 'draftsmith[{name}]'")


def start_tracker(accelerator: Any, name: TrackerName, folder: Path, config: dict[str, Any]) -> None:
    """Open a run of the tracker through accelerate, the same one when a job goes on; FOLDER holds its name.

    wandb without a key or a mode is kept offline, and says so.
    """
    if name == "wandb" and not _knows_wandb():
        os.environ["WANDB_MODE"] = "offline"
        if accelerator.is_main_process:
            print("wandb: no API key, the run is kept offline (wandb sync sends it later)", file=sys.stderr)
    if name == "tensorboard":
        config = _flat(config)  # it takes no sections
    try:
        accelerator.init_trackers(PROJECT, config=config, init_kwargs=_same_run(name, folder))
    except Exception as error:
        accelerator.trackers = []
        if accelerator.is_main_process:
            print(f"{name}: {error}; training goes on without it", file=sys.stderr)


def end_tracker(accelerator: Any) -> None:
    """Close the tracker's run, whose failure is told and costs nothing, and the processes' ties to each other."""
    accelerator.wait_for_everyone()  # one that leaves while others still talk may end badly
    try:
        accelerator.end_training()
    except Exception as error:
        print(f"tracker: {error}", file=sys.stderr)


def _same_run(name: TrackerName, folder: Path) -> dict[str, Any]:
    """What makes a tracker go on with the run that was begun."""
    if name == "tensorboard":
        return {}  # its files lie in one folder
    known = folder / f"{name}.txt"
    if not known.is_file():
        write_text(known, uuid.uuid4().hex[:8])
    run = known.read_text(encoding="utf-8")
    if name == "wandb":
        return {"wandb": {"id": run, "resume": "allow", "dir": os.environ.get("WANDB_DIR", str(folder))}}
    return {"trackio": {"name": run, "resume": "allow"}}


def _knows_wandb() -> bool:
    return bool({"WANDB_MODE", "WANDB_API_KEY"} & os.environ.keys()) or (Path.home() / ".netrc").exists()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


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
