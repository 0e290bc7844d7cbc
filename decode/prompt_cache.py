"""Keys and values of texts that were decoded before, for prompts that begin alike: a system prompt, earlier turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Draft
from decode.kv import Reader

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
    """A reader, and the draft's state, of the first `tokens` tokens of a prompt, free to go on."""

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

    def find(self, prompt: Sequence[int], draft: Draft[Any] | None, taps: Sequence[int]) -> Found | None:
        """The longest beginning of `prompt`, its last token left out, that a kept text shares; None for a short one."""
        usable = [entry for entry in self.entries if entry.reader.taps == tuple(taps)]
        lengths = [min(_shared(entry.ids, prompt), len(prompt) - 1, entry.reader.length) for entry in usable]
        if not lengths or max(lengths) < SHORTEST:
            return None
        entry, tokens = usable[lengths.index(max(lengths))], max(lengths)
        reader = entry.reader.clone()
        reader.rewind(tokens)
        state = None
        if draft is not None and entry.draft is draft:
            state = draft.rewound(entry.draft_state.clone(), tokens)
        return Found(tokens, reader, None if entry.tapped is None else entry.tapped[:, :tokens], state)

    def keep(self, ids: list[int], reader: Reader, tapped: Tensor | None, draft: Draft[Any] | None, state: Any) -> None:
        """Remember a finished text; the oldest goes."""
        if not reader.keeps_everything:
            return
        self.entries = [*self.entries, Entry(ids, reader, tapped, draft, state)][-self.size :]

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
