"""Checkpoints that are whole or absent: written under a temporary name, renamed, older ones pruned afterwards."""

import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError

# "Removed shared tensor": a tied head is shared on purpose, and comes back tied.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


@dataclass
class Progress:
    """How far a run is. With the row order a function of seed and step, this is all that resuming needs."""

    step: int = 0
    tokens: int = 0
    best_score: float | None = None
    best_step: int = 0
    means: list[float] = field(default_factory=list)
    processes: int = 1


def save_checkpoint(accelerator: Any, folder: Path, progress: Progress, keep: int) -> None:
    """Save weights, optimiser, RNG of every process and `progress` as FOLDER/step-000123; keep the newest `keep`.

    Every process must call this.
    """
    final = folder / f"step-{progress.step:06d}"
    temporary = folder / (final.name + ".tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Any, folder: Path) -> Progress:
    """Load the newest complete checkpoint in FOLDER into what accelerate prepared; a fresh Progress without one.

    Raises UserError when it was saved by another number of processes.
    """
    complete = _complete(folder)
    if not complete:
        return Progress(processes=accelerator.num_processes)
    progress = Progress(**json.loads((complete[-1] / "progress.json").read_text(encoding="utf-8")))
    if progress.processes != accelerator.num_processes:
        raise UserError(
            f"{complete[-1]} was saved by {progress.processes} processes and cannot be resumed by "
            f"{accelerator.num_processes}; launch with --num_processes {progress.processes}"
        )
    accelerator.load_state(str(complete[-1]))
    return progress


def remove_checkpoints(folder: Path) -> None:
    """A finished run needs its checkpoints no more."""
    shutil.rmtree(folder, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp")
