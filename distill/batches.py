"""Which rows make up a step, for each process: a function of seed and step alone."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from distill.rows import Row


@dataclass(frozen=True)
class Batch:
    """Right-padded ids [B, T], and the positions whose next token is supervised, predicts [B, T] (bool).

    Padding lies to the right of everything that is supervised, so causal attention needs no mask for it.
    """

    ids: Tensor
    predicts: Tensor


def collate(rows: list[Row], device: torch.device) -> Batch:
    """Pad rows to the longest. The position before an answer token predicts it; an answer's last one does not."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    predicts = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        predicts[i, : len(row.ids) - 1] = torch.tensor(row.is_answer[1:])
    return Batch(ids.to(device), predicts.to(device))


@dataclass(frozen=True)
class Schedule:
    """The rows of every step: each epoch is one shuffle of all rows; a step takes the next `batch_rows`."""

    num_rows: int
    batch_rows: int
    seed: int

    def rows_of(self, step: int) -> list[int]:
        """Row numbers of step `step` over all processes; a step may span two epochs."""
        first = step * self.batch_rows
        return [self._row_at(position) for position in range(first, first + self.batch_rows)]

    def share_of(self, step: int, process: int, processes: int) -> list[int]:
        """The rows of one process: every `processes`-th, so that all have equally many."""
        return self.rows_of(step)[process::processes]

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_rows)
        return _epoch_order(self.num_rows, self.seed, epoch)[place]


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()
