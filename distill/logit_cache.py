"""The teacher's most likely log-probabilities of every supervised token, kept on disk: the teacher runs once.

For a draft that reads the target's hidden states, those of every token are kept too.

A cache is a folder of safetensors shards and a manifest.json, written last, that says whose they are and checks them.
Shapes: N supervised tokens of M in all, k kept ids, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.errors import UserError
from configs.files import sha256, whole_file, write_json
from configs.reader import differing_keys
from configs.settings import StrictSettings
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher

ROWS_AT_ONCE, TOKENS_AT_ONCE = 32, 128


class CacheSettings(StrictSettings):
    """A cache of the teacher's log-probabilities."""

    folder: Path | None = Field(None, description="Train from this cache (`draftsmith data cache` writes it).")
    top_k: int = Field(64, ge=1, description="Ids kept for each token; the mass of all others is kept as one number.")
    taps: tuple[int, ...] = Field(
        (), description="Hidden states of the target to keep for every token too (0: embeddings), for feature drafts."
    )
    shard_tokens: int = Field(16384, ge=1, description="Supervised tokens of a shard.")
    ask_above_gib: float = Field(2.0, ge=0, description="Larger caches are written only with --yes.")


class Shard(BaseModel):
    """Rows `first_row` up to `end_row` of the data."""

    file: str
    first_row: int
    end_row: int
    tokens: int
    sha256: str


class Manifest(BaseModel):
    """`identity` says what the numbers are of: target, template, data, how rows are read, k, dtype.

    `scored_by` is "here" or "engine" (whose dtype is its own). It does not matter to training.
    """

    identity: dict[str, Any]
    scored_by: str
    rows: int
    tokens: int
    shards: list[Shard]


@dataclass(frozen=True)
class Signal:
    """True log-probabilities top_logp [N, k] of the likeliest ids top_ids [N, k], and the mass of all others [N]."""

    top_ids: Tensor
    top_logp: Tensor
    tail: Tensor

    def __len__(self) -> int:
        return len(self.tail)

    @staticmethod
    def joined(signals: Sequence["Signal"]) -> "Signal":
        """One after the other."""
        return Signal(*(torch.cat([getattr(s, name) for s in signals]) for name in ("top_ids", "top_logp", "tail")))

    def split(self, lengths: Sequence[int]) -> list["Signal"]:
        """Runs of `lengths` tokens."""
        tensors = (self.top_ids, self.top_logp, self.tail)
        return [Signal(*parts) for parts in zip(*(torch.split(t, list(lengths)) for t in tensors), strict=True)]

    def within(self, head_ids: Tensor | None, vocabulary: int) -> "Signal":
        """The same over a trimmed head: ids become rows of it, what it lacks becomes row V_d with probability 0.

        The law is not renormalised. The tail may lie inside the head or outside.
        """
        if head_ids is None:
            return self
        rows = torch.full((vocabulary,), len(head_ids), dtype=torch.long)
        rows[head_ids] = torch.arange(len(head_ids))
        top_rows = rows[self.top_ids]
        outside = top_rows == len(head_ids)
        logp = self.top_logp.masked_fill(outside, -torch.inf)
        # Where every row of the head is among the top, none of the rest can lie in the head.
        tail = self.tail.masked_fill((~outside).sum(-1) == len(head_ids), 0.0)
        return Signal(top_rows, logp, tail)


# Of a few rows, with top_k and taps: the signal, and the tapped hidden states [M, D·taps] of all their tokens.
Score = Callable[[Sequence[Row], int, Sequence[int]], tuple[Signal, Tensor]]


def scored_by(teacher: Teacher) -> Score:
    """Signals from a teacher in this process; logits exist for `TOKENS_AT_ONCE` tokens at a time."""

    @torch.no_grad()
    def score(rows: Sequence[Row], top_k: int, taps: Sequence[int]) -> tuple[Signal, Tensor]:
        head = teacher.head_weight
        batch = collate([[row] for row in rows], head.device)
        last, tapped = teacher.read(batch.ids, batch.predicts, taps=taps)
        found = []
        for hidden in torch.split(last, TOKENS_AT_ONCE):
            logp = (hidden @ head.T).float().log_softmax(-1)
            top = logp.topk(min(top_k, logp.shape[-1]), dim=-1)
            tail = logp.scatter(-1, top.indices, -torch.inf).logsumexp(-1).exp()
            found.append(Signal(top.indices.cpu(), top.values.cpu(), tail.cpu()))
        of_tokens = torch.cat([tapped[i, : len(row.ids)] for i, row in enumerate(rows)])
        return Signal.joined(found), of_tokens.cpu()

    return score


def bytes_per_token(top_k: int, vocabulary: int) -> int:
    """Of a supervised token: two bytes a log-probability, two an id (four above 65,536 ids), four for the tail."""
    return top_k * (2 + (2 if vocabulary <= 2**16 else 4)) + 4


def whole_bytes(rows: Sequence[Row], settings: CacheSettings, config: Any) -> int:
    """Of the whole cache, for a target with this transformers `config`; a tapped hidden state takes two bytes."""
    supervised, tokens = sum(row.supervised for row in rows), sum(len(row.ids) for row in rows)
    tapped = 2 * len(settings.taps) * config.hidden_size if settings.taps else 0
    return supervised * bytes_per_token(settings.top_k, config.vocab_size) + tokens * tapped


def check_taps(taps: Sequence[int], config: Any) -> None:
    """Raises UserError for a hidden state that a target with this transformers `config` does not have."""
    if not all(0 <= tap <= config.num_hidden_layers for tap in taps) or len(set(taps)) < len(taps):
        raise UserError(f"taps {list(taps)}: expected different ones out of 0..{config.num_hidden_layers}")


def write_cache(
    score: Score, rows: Sequence[Row], settings: CacheSettings, identity: dict[str, Any], vocabulary: int,
    scorer: str = "here", rows_at_once: int = ROWS_AT_ONCE,
) -> Manifest:  # fmt: skip
    """Fill `settings.folder`; shards that an earlier, killed run finished are kept. A finished cache is read back.

    `score` gives the signals of a few rows: `scored_by` a teacher here, or a serving engine (distill.engine), which
    `scorer` names in the manifest.
    Raises UserError for a folder that holds another cache, naming what differs.
    """
    folder = settings.folder
    assert folder is not None
    finished, unfinished = folder / "manifest.json", folder / "unfinished.json"
    if finished.is_file():
        return read_manifest(folder, identity)
    begun = _read(unfinished, identity) if unfinished.is_file() else None
    if begun and begun.scored_by != scorer:
        raise UserError(f"{folder}: begun with scores by {begun.scored_by!r}; go on with those, or remove it")
    done = begun.shards if begun else []
    plan = list(_plan(rows, settings.shard_tokens))
    tokens = sum(row.supervised for row in rows)
    manifest = Manifest(identity=identity, scored_by=scorer, rows=len(rows), tokens=tokens, shards=done)
    folder.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        bar = progress.add_task("tokens", total=tokens, completed=sum(shard.tokens for shard in done))
        for number, (first, end) in list(enumerate(plan))[len(done) :]:
            file = folder / f"shard-{number:05d}.safetensors"
            order = sorted(range(first, end), key=lambda i: len(rows[i].ids))  # so that little is padding
            found: dict[int, tuple[Signal, Tensor]] = {}
            for at in range(0, len(order), rows_at_once):
                some = order[at : at + rows_at_once]
                signal, tapped = score([rows[i] for i in some], settings.top_k, settings.taps)
                by_row = signal.split([rows[i].supervised for i in some])
                tapped_by_row = torch.split(tapped, [len(rows[i].ids) for i in some])
                found |= zip(some, zip(by_row, tapped_by_row, strict=True), strict=True)
                progress.advance(bar, len(signal))
            signals, all_tapped = zip(*(found[i] for i in range(first, end)), strict=True)
            signal = Signal.joined(signals)
            _save(signal, torch.cat(all_tapped), file, vocabulary)
            shard = Shard(file=file.name, first_row=first, end_row=end, tokens=len(signal), sha256=sha256(file))
            manifest.shards.append(shard)
            write_json(unfinished, manifest.model_dump(mode="json"))
    write_json(finished, manifest.model_dump(mode="json"))
    unfinished.unlink(missing_ok=True)
    return manifest


def read_manifest(folder: Path, identity: dict[str, Any]) -> Manifest:
    """The manifest of a finished cache. Raises UserError when there is none, or it is of something else."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no finished cache in it; `draftsmith data cache` (same --config) writes or resumes it"
        )
    return _read(path, identity)


class LogitCache:
    """Signals by row, read from a finished cache. Every shard is checked against the manifest first."""

    def __init__(self, folder: Path, rows: Sequence[Row], identity: dict[str, Any]) -> None:
        manifest = read_manifest(folder, identity)
        if manifest.rows != len(rows) or manifest.tokens != sum(row.supervised for row in rows):
            raise UserError(f"{folder}: holds {manifest.rows} rows, {manifest.tokens} tokens; the data has other rows")
        for shard in manifest.shards:
            file = folder / shard.file
            if not file.is_file() or sha256(file) != shard.sha256:
                raise UserError(f"{file}: not the shard that the manifest names; remove {folder} and write it again")
        self._folder, self._shards = folder, manifest.shards
        self._starts = _starts(rows, manifest.shards)

    def signal(self, row: Row) -> Signal:
        """What the teacher said at the supervised places of `row`."""
        content, start, _ = self._place(row)
        ids, logp, tail = (content.get_slice(name)[start : start + row.supervised] for name in ("ids", "logp", "tail"))
        return Signal(ids.to(torch.int32).long(), logp.float(), tail)

    def tapped(self, row: Row) -> Tensor:
        """The tapped hidden states of every token of `row`, [T, D·taps], as kept."""
        content, _, start = self._place(row)
        tapped: Tensor = content.get_slice("tapped")[start : start + len(row.ids)]
        return tapped

    def _place(self, row: Row) -> tuple[Any, int, int]:
        """Its shard, and where in it the row's first supervised token and its first token are."""
        shard, supervised, token = self._starts[row.number]
        return _opened(self._folder / self._shards[shard].file), supervised, token


def _starts(rows: Sequence[Row], shards: Sequence[Shard]) -> list[tuple[int, int, int]]:
    """For each row its shard, and the places of its first supervised token and of its first token in it."""
    starts = []
    for number, shard in enumerate(shards):
        supervised = token = 0
        for row in rows[shard.first_row : shard.end_row]:
            starts.append((number, supervised, token))
            supervised, token = supervised + row.supervised, token + len(row.ids)
    return starts


def _plan(rows: Sequence[Row], shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Runs of whole rows with `shard_tokens` or more supervised tokens."""
    first = tokens = 0
    for number, row in enumerate(rows, start=1):
        tokens += row.supervised
        if tokens >= shard_tokens or number == len(rows):
            yield first, number
            first, tokens = number, 0


def _save(signal: Signal, tapped: Tensor, file: Path, vocabulary: int) -> None:
    ids = signal.top_ids.to(torch.uint16 if vocabulary <= 2**16 else torch.int32)
    # bfloat16: some hidden states lie beyond float16.
    kept = {"ids": ids, "logp": signal.top_logp.half(), "tail": signal.tail, "tapped": tapped.bfloat16()}
    with whole_file(file) as unfinished:
        save_file({name: values for name, values in kept.items() if values.numel()}, unfinished)


@lru_cache(maxsize=256)
def _opened(file: Path) -> Any:
    """Mapped, not read: rows come in random order."""
    return safe_open(file, framework="pt")


def _read(path: Path, identity: dict[str, Any]) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError:
        raise UserError(f"{path}: not a manifest of a cache") from None
    different = differing_keys(manifest.identity, identity)
    if different:
        raise UserError(f"{path.parent}: a cache of something else (different: {', '.join(different)})")
    return manifest
