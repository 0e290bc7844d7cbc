"""Micro-batches for the training loop: this process's rows of a step, with the teacher's signal."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from configs.errors import UserError
from distill.batches import Schedule, collate
from distill.rows import Row
from distill.teacher import Teacher
from train.loop import TrainSettings


@dataclass(frozen=True)
class Supply:
    """Implements train.loop.Batches for distillation with an online teacher."""

    rows: list[Row]
    schedule: Schedule
    teacher: Teacher
    micro_rows: int
    accelerator: Any

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        share = self.schedule.share_of(step, self.accelerator.process_index, self.accelerator.num_processes)
        portions = [share[i : i + self.micro_rows] for i in range(0, len(share), self.micro_rows)]
        return [self._inputs([self.rows[i] for i in portion]) for portion in portions]

    def supervised_tokens(self, step: int) -> int:
        return sum(self.rows[i].supervised for i in self.schedule.rows_of(step))

    def _inputs(self, rows: list[Row]) -> dict[str, Tensor]:
        batch = collate(rows, self.accelerator.device)
        return {
            "ids": batch.ids,
            "predicts": batch.predicts,
            "teacher_hidden": self.teacher.hidden(batch.ids, batch.predicts),
            "teacher_head": self.teacher.head_weight,
        }


def micro_batches_per_step(settings: TrainSettings, processes: int | None = None) -> int:
    """Forward passes of one process per step. Raises UserError when the rows cannot be shared out equally."""
    import os

    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if settings.batch_rows % processes:
        raise UserError(
            f"train.batch_rows is {settings.batch_rows}, which {processes} processes cannot share equally; "
            f"use a multiple of {processes}"
        )
    return ceil(settings.batch_rows // processes / settings.micro_rows)
