"""Keys and values of texts that were decoded before, for prompts that begin alike: a system prompt, earlier turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.kv import Clock, Reader

SHORTEST = 8  # tokens in common from which on a copy pays


@dataclass
class Entry:
    """A text that target and draft have read, with the target's tapped hidden states [1, L, D·taps] of it."""

    ids: list[int]
    reader: Reader
    tapped: Tensor | None
    draft: Draft[Any] | None
    draft_state: Any


@dataclass
class Found:
    """A reader of the first `tokens` tokens of a prompt, free to go on, and the state of a draft that read them too."""

    tokens: int
    reader: Reader
    tapped: Tensor | None
    draft_state: Any


@dataclass
class PromptCache:
    """Give it to several calls: the target and the draft read what two prompts have in common once.

    It keeps the last `size` texts, prompt and answer, of one target; another draft shares the target's part alone.
    The output is what it is without: what is copied is what would have been read. `prompt_tokens`, `reused_tokens`,
    `read_s` and `saved_s` count over all calls; a token that was not read saved what one that was took on average.
    """

    size: int = 4
    prompt_tokens: int = 0
    reused_tokens: int = 0
    read_s: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    @property
    def hit_rate(self) -> float | None:
        """Share of all prompt tokens that were not read again."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def saved_s(self) -> float:
        """Seconds of prefill that were saved, by the pace of what was read."""
        read = self.prompt_tokens - self.reused_tokens
        return self.reused_tokens * self.read_s / read if read else 0.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a prompt cache of {self.size} texts: expected 1 or more")

    def find(self, prompt: Sequence[int], target: Any, draft: Draft[Any] | None, clock: Clock) -> Found | None:
        """The longest beginning of `prompt`, its last token left out, that a kept text of this target shares.

        None for a short one. Of equal ones that which the draft has read, then the last.
        """
        taps, best = draft.taps if draft else (), (0, False, 0)
        for i, entry in enumerate(self.entries):
            if entry.reader.model is target and entry.reader.taps == tuple(taps):
                tokens = min(_shared(entry.ids, prompt), len(prompt) - 1, entry.reader.length)
                best = max(best, (tokens, entry.draft is draft, i))
        tokens, is_its_own, i = best
        if tokens < SHORTEST:
            return None
        entry = self.entries[i]
        tapped = None if entry.tapped is None else entry.tapped[:, :tokens]
        return Found(tokens, entry.reader.beginning(tokens, clock), tapped, entry.draft_state if is_its_own else None)

    def keep(self, ids: list[int], reader: Reader, tapped: Tensor | None, draft: Draft[Any] | None, state: Any) -> None:
        """Remember a finished text instead of its own beginnings; the oldest goes."""
        if not reader.keeps_everything:
            return
        others = [
            entry for entry in self.entries
            if ids[: len(entry.ids)] != entry.ids or entry.reader.model is not reader.model or entry.draft is not draft
        ]  # fmt: skip
        self.entries = [*others, Entry(ids, reader, tapped, draft, state)][-self.size :]

    def count(self, prompt_tokens: int, reused: int, read_s: float) -> None:
        """Take note of a prompt."""
        self.prompt_tokens += prompt_tokens
        self.reused_tokens += reused
        self.read_s += read_s


def joined(tapped: Sequence[Tensor | None]) -> Tensor | None:
    """Hidden states of consecutive tokens as one tensor [1, T, D·taps]; None where there are none."""
    parts = [part for part in tapped if part is not None]
    return torch.cat(parts, dim=1) if parts else None


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
