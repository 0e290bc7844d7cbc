"""Checkpoints that are whole or absent: written under a temporary name, renamed, older ones pruned afterwards."""

import json
import logging
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.files import writing
from train.parallel import launch_name

PROGRESS = "progress.json"
# "Removed shared tensor": a tied head is shared on purpose, and comes back tied.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@dataclass
class Progress:
    """How far a run is. With the row order a function of seed and step, this is all that resuming needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stopped: bool = False  # before its last step: out of time, or the score no longer rises
    measured_step: int = -1
    best_score: float | None = None
    best_step: int = 0
    means: list[float] = field(default_factory=list)
    skipped: int = 0
    skipped_in_a_row: int = 0
    evidence: list[list[list[float]]] = field(default_factory=list)  # of the last measurements, for train.patience
    processes: int = 1
    launch: str = ""
    threads: int = 1


def save_checkpoint(accelerator: Any, folder: Path, progress: Progress, keep: int) -> None:
    """Save weights, optimiser, RNG of every process and `progress` as FOLDER/step-000123; keep the newest `keep`.

    Every process must call this. Raises UserError when it cannot be written, e.g. on a full disk; the checkpoint
    before is there still.
    """
    progress.processes, progress.launch = accelerator.num_processes, launch_name(accelerator)
    progress.threads = torch.get_num_threads()
    final = folder / f"step-{progress.step:06d}"
    temporary = folder / (final.name + ".tmp")
    with writing(final, temporary):
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _mark_complete(temporary, progress)
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            newer = [path for path in _named(folder) if _step_of(path) > progress.step]  # not whole, or not resumed
            for path in [*newer, *[path for path in _named(folder) if path not in newer][:-keep]]:
                shutil.rmtree(path)
        accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Any, folder: Path) -> Progress:
    """Load the newest complete checkpoint in FOLDER into what accelerate prepared; a fresh Progress without one.

    Raises UserError when it was saved by another number of processes, or by another kind of launch.
    """
    newest = _newest(folder)
    if newest is None:
        if _named(folder) and accelerator.is_main_process:
            print(f"{folder}: no checkpoint is whole; starting from the beginning", file=sys.stderr)
        return Progress()
    check_processes(folder, accelerator.num_processes)
    progress = _progress(newest)
    if progress.launch != launch_name(accelerator):
        raise UserError(
            f"{newest} was saved by {progress.launch} and cannot be resumed by {launch_name(accelerator)}; "
            "launch as before"
        )
    accelerator.load_state(str(newest))
    accelerator.step = 0  # of micro-batches, of which a step may have another number now
    return progress


def check_processes(folder: Path, processes: int) -> None:
    """Raises UserError where the newest checkpoint in FOLDER was saved by another number of processes."""
    newest = _newest(folder)
    if newest is None:
        return
    saved = _progress(newest).processes
    if saved != processes:
        raise UserError(
            f"{newest} was saved by {saved} processes and cannot be resumed by {processes}; launch with "
            f"--num_processes {saved}, or name another output"
        )


def remove_checkpoints(folder: Path) -> None:
    """A finished run needs its checkpoints no more."""
    shutil.rmtree(folder, ignore_errors=True)


def _mark_complete(checkpoint: Path, progress: Progress) -> None:
    """Write how far the run is, and what else must lie beside it, in which sizes."""
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in _files(checkpoint)}
    (checkpoint / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
    (checkpoint / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def _is_whole(checkpoint: Path) -> bool:
    """Whether everything is there that was saved: a copy may have been cut off."""
    try:
        sizes = json.loads((checkpoint / "sizes.json").read_text(encoding="utf-8"))
        json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _named(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.suffix != ".tmp"), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _newest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next((path for path in reversed(_named(folder)) if _is_whole(path)), None)


def _progress(checkpoint: Path) -> Progress:
    return Progress(**json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8")))
