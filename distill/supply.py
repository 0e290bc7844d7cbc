"""Micro-batches for the training loop: this process's rows of a step, with the teacher's signal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from distill.batches import Schedule, collate
from distill.logit_cache import LogitCache, Signal
from distill.on_policy import OnPolicy
from distill.rows import Row
from distill.teacher import Teacher
from train.loop import TrainSettings


@dataclass
class Supply:
    """Implements train.loop.Batches for distillation, the teacher online or cached. A sequence has one or more rows.

    `head_ids` are the target's ids of the draft's head where it is trimmed; `taps` are the target's hidden states that
    the draft reads, with the tokens' embeddings.
    """

    sequences: Sequence[Sequence[Row]]
    schedule: Schedule
    teacher: Teacher
    micro_rows: int
    accelerator: Any
    head_ids: Tensor | None = None
    taps: tuple[int, ...] = ()
    cache: LogitCache | None = None
    on_policy: OnPolicy | None = None
    _rolled_out: dict[int, list[Sequence[Row]]] = field(default_factory=dict)

    def micro_batches(self, step: int) -> list[dict[str, Any]]:
        share = sorted(self._share(step), key=lambda rows: -sum(len(row.ids) for row in rows))  # little padding
        return [self._inputs(share[i : i + self.micro_rows]) for i in range(0, len(share), self.micro_rows)]

    def supervised_tokens(self, step: int) -> int:
        if self.on_policy is None:
            return self.planned_tokens(step)
        own = sum(row.supervised for rows in self._share(step) for row in rows)
        return int(self.accelerator.reduce(torch.tensor(own, device=self.accelerator.device), reduction="sum"))

    def planned_tokens(self, step: int) -> int:
        return sum(row.supervised for i in self.schedule.rows_of(step) for row in self.sequences[i])

    def _share(self, step: int) -> list[Sequence[Row]]:
        """This process's sequences of a step, some of them rolled out anew; asked for several times, made once."""
        if step not in self._rolled_out:
            numbers = self.schedule.share_of(step, self.accelerator.process_index, self.accelerator.num_processes)
            share: list[Sequence[Row]] = [self.sequences[i] for i in numbers]
            if self.on_policy is not None:
                share = self.on_policy.rewrite_all(step, share)
            self._rolled_out.clear()
            self._rolled_out[step] = share
        return self._rolled_out[step]

    def _inputs(self, sequences: Sequence[Sequence[Row]]) -> dict[str, Any]:
        batch = collate(sequences, self.accelerator.device)
        inputs: dict[str, Any] = {"ids": batch.ids, "predicts": batch.predicts}
        if batch.positions is not None:
            inputs["positions"] = batch.positions
        if batch.weights is not None:
            inputs["weights"] = batch.weights
        if self.cache is None:
            hidden, tapped = self.teacher.read(batch.ids, batch.predicts, batch.positions, self.taps)
            inputs["signal"] = {"hidden": hidden, "head": self.teacher.head_weight}
        else:
            signals = [self.cache.signal(row) for rows in sequences for row in rows]
            vocabulary = self.teacher.head_weight.shape[0]
            whole = Signal.joined(signals).within(None if self.head_ids is None else self.head_ids.cpu(), vocabulary)
            inputs["signal"] = {name: value.to(batch.ids.device) for name, value in vars(whole).items()}
            tapped = self._cached_taps(self.cache, sequences).to(batch.ids.device)
        if self.taps:
            inputs |= {"tapped": tapped, "embedded": self.teacher.embedded(batch.ids)}
        return inputs

    def _cached_taps(self, cache: LogitCache, sequences: Sequence[Sequence[Row]]) -> Tensor:
        """The hidden states of every token [B, T, E·taps], zero in the padding."""
        if not self.taps:
            return torch.empty(0)
        return nn.utils.rnn.pad_sequence(
            [torch.cat([cache.tapped(row) for row in rows]) for rows in sequences], batch_first=True
        )


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
