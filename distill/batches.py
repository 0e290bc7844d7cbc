"""Which rows make up a step, for each process: a function of seed and step alone."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from distill.rows import Row


@dataclass(frozen=True)
class Batch:
    """Right-padded ids [B, T], and the positions whose next token is supervised, predicts [B, T] (bool).

    Padding lies to the right of everything that is supervised, so causal attention needs no mask for it. `positions`
    [B, T] start again with each row where several share a sequence, which keeps attention inside them; else None.
    `weights` [N] multiply the loss of the N supervised tokens; None where all are 1.
    """

    ids: Tensor
    predicts: Tensor
    positions: Tensor | None
    weights: Tensor | None


def collate(sequences: Sequence[Sequence[Row]], device: torch.device) -> Batch:
    """Pad sequences, each of one or more rows, to the longest.

    The position before an answer token predicts it; an answer's last one does not, nor does the end of one row
    predict the start of the next.
    """
    longest = max(sum(len(row.ids) for row in rows) for rows in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    predicts = torch.zeros(len(sequences), longest, dtype=torch.bool)
    positions = torch.arange(longest).repeat(len(sequences), 1)
    for i, rows in enumerate(sequences):
        start = 0
        for row in rows:
            stop = start + len(row.ids)
            ids[i, start:stop] = torch.tensor(row.ids)
            predicts[i, start : stop - 1] = torch.tensor(row.is_answer[1:], dtype=torch.bool)
            positions[i, start:] = torch.arange(longest - start)
            start = stop
    packed = any(len(rows) > 1 for rows in sequences)
    return Batch(
        ids.to(device), predicts.to(device), positions.to(device) if packed else None, _weights(sequences, device)
    )


def _weights(sequences: Sequence[Sequence[Row]], device: torch.device) -> Tensor | None:
    every_row = [row for rows in sequences for row in rows]
    if all(row.weights is None for row in every_row):
        return None
    found = [
        weight
        for row in every_row
        for weight, mark in zip((row.weights or [1.0] * len(row.ids))[1:], row.is_answer[1:], strict=True)
        if mark
    ]
    return torch.tensor(found, device=device)


def pack(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows put together into sequences of up to `max_tokens`: longest first, each where the least room is left over."""
    sequences: list[list[Row]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, sequence), ascending
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        at = bisect_left(rooms, (len(row.ids), 0))
        if at < len(rooms):
            left, place = rooms.pop(at)
        else:
            left, place = max(max_tokens, len(row.ids)), len(sequences)
            sequences.append([])
        sequences[place].append(row)
        insort(rooms, (left - len(row.ids), place))
    return sequences


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
