"""Drafts that follow several texts together. What they propose for a text is what they would propose for it alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.batch_reader import BatchReader, gathered, right_aligned, squeezed
from decode.drafts.contract import Draft, Proposal
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.lm import LMDraft
from decode.draws import Draws
from decode.kv import Clock
from decode.laws import Law


@dataclass
class Asked:
    """Of one text: how many tokens to draft (0: none), under which law, with which draws."""

    tokens: int
    law: Law
    draws: Draws


class BatchedDraft(Protocol):
    """One draft on B texts [1, L_i]; hidden states as in contract.Draft, one tensor for each text."""

    def propose(self, texts: Sequence[Tensor], asked: Sequence[Asked]) -> list[Proposal]:
        """For each text what was asked for it. The seconds in forwards are of all, shared out evenly."""
        ...

    def commit(self, texts: Sequence[Tensor], hidden: Sequence[Tensor | None]) -> None:
        """The texts have grown; `hidden` is as in contract.Draft.commit."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these texts alone."""
        ...


def follow(draft: Draft[Any], texts: Sequence[Tensor], hidden: Sequence[Tensor | None], clock: Clock) -> BatchedDraft:
    """Begin to follow the committed `texts` [1, L_i], of which all but the last token have `hidden`.

    A text that the draft's context cannot hold is not read, and nothing must be asked for it.
    """
    fits = [text.shape[1] <= draft.context_tokens for text in texts]
    if isinstance(draft, LMDraft):
        return _LM(draft, texts, fits, clock)
    if isinstance(draft, Eagle3Draft):
        return _Eagle3(draft, texts, hidden, fits, clock)
    return _OneByOne(draft, texts, hidden, fits, clock)


class _OneByOne:
    """A draft whose steps cost next to nothing, or that nobody has taught to read in batches."""

    def __init__(
        self, draft: Draft[Any], texts: Sequence[Tensor], hidden: Sequence[Tensor | None], fits: Sequence[bool],
        clock: Clock,
    ) -> None:  # fmt: skip
        self._draft = draft
        self._states = [
            draft.start(text, states, clock) if so else None
            for text, states, so in zip(texts, hidden, fits, strict=True)
        ]
        self._lengths = [text.shape[1] for text in texts]

    def propose(self, texts: Sequence[Tensor], asked: Sequence[Asked]) -> list[Proposal]:
        return [
            self._draft.propose(state, one.tokens, one.law, one.draws) if one.tokens else nothing(text)
            for state, text, one in zip(self._states, texts, asked, strict=True)
        ]

    def commit(self, texts: Sequence[Tensor], hidden: Sequence[Tensor | None]) -> None:
        for i, (text, states) in enumerate(zip(texts, hidden, strict=True)):
            if self._states[i] is not None:
                self._draft.commit(self._states[i], text[:, self._lengths[i] :], states)
            self._lengths[i] = text.shape[1]

    def select(self, rows: Tensor) -> None:
        self._states = [self._states[i] for i in rows.tolist()]
        self._lengths = [self._lengths[i] for i in rows.tolist()]


class _LM:
    """A causal LM of its own: its cache holds the texts as the target's does."""

    def __init__(self, draft: LMDraft, texts: Sequence[Tensor], fits: Sequence[bool], clock: Clock) -> None:
        self._draft, self._reader = draft, BatchReader(draft.model, len(texts), clock)
        unread = [text[0, :-1].tolist() if so else [] for text, so in zip(texts, fits, strict=True)]
        if any(unread):
            self._reader.read(*right_aligned(unread, texts[0].device), keep=1)

    def propose(self, texts: Sequence[Tensor], asked: Sequence[Asked]) -> list[Proposal]:
        began_s, whole = self._reader.forward_s, [text.clone() for text in texts]
        laws: list[list[Tensor]] = [[] for _ in texts]
        for step in range(max(one.tokens for one in asked)):
            drafts = [step < one.tokens for one in asked]
            read = self._reader.lengths.tolist()
            unread = [text[0, n:].tolist() if so else [] for text, n, so in zip(whole, read, drafts, strict=True)]
            logits = self._draft.align(self._reader.read(*right_aligned(unread, texts[0].device), keep=1))
            for i, one in enumerate(asked):
                if drafts[i]:
                    laws[i].append(one.law(logits[i : i + 1], whole[i]))
                    chosen = one.draws.choose(laws[i][-1], whole[i].shape[1])
                    whole[i] = torch.cat([whole[i], chosen], dim=1)
        return _proposals(texts, whole, laws, self._reader.forward_s - began_s)

    def commit(self, texts: Sequence[Tensor], hidden: Sequence[Tensor | None]) -> None:
        ends = torch.tensor([text.shape[1] - 1 for text in texts], device=texts[0].device)
        self._reader.rewind(torch.minimum(self._reader.lengths, ends))

    def select(self, rows: Tensor) -> None:
        self._reader.select(rows)


class _Eagle3:
    """A feature draft: keys of the entries that have true features, and those of a chain for the length of a round."""

    def __init__(
        self, draft: Eagle3Draft, texts: Sequence[Tensor], hidden: Sequence[Tensor | None], fits: Sequence[bool],
        clock: Clock,
    ) -> None:  # fmt: skip
        self._draft, self._clock, self._fits = draft, clock, list(fits)
        self._unread = [
            states[0] if so else states[0, :0] for states, so in zip(hidden, fits, strict=True) if states is not None
        ]
        self._past: Any = None
        self._held = torch.zeros(len(texts), 0, dtype=torch.bool, device=texts[0].device)
        self._last: Any = None
        self._read_committed(texts)

    def propose(self, texts: Sequence[Tensor], asked: Sequence[Asked]) -> list[Proposal]:
        model, whole = self._draft.model, [text.clone() for text in texts]
        laws: list[list[Tensor]] = [[] for _ in texts]
        began = self._clock()
        self._read_committed(texts)
        forward_s = self._clock() - began
        hidden, chain, held = self._last, self._past, self._held
        for step in range(max(one.tokens for one in asked)):
            began = self._clock()
            if step:
                last = torch.cat([text[:, -1:] for text in whole])
                positions = torch.tensor([[text.shape[1] - 2] for text in whole], device=last.device)
                held = torch.cat([held, held.new_ones(len(held), 1)], dim=1)
                hidden, chain = model(self._embedded(last), hidden, positions, chain, held[:, None, None])
            logits = self._draft.align(model.logits(hidden))
            forward_s += self._clock() - began
            for i, one in enumerate(asked):
                if step < one.tokens:
                    laws[i].append(one.law(logits[i : i + 1], whole[i]))
                    chosen = one.draws.choose(laws[i][-1], whole[i].shape[1])
                    whole[i] = torch.cat([whole[i], chosen], dim=1)
        return _proposals(texts, whole, laws, forward_s)

    def commit(self, texts: Sequence[Tensor], hidden: Sequence[Tensor | None]) -> None:
        self._unread = [
            torch.cat([before, states[0]]) if so else before
            for before, states, so in zip(self._unread, hidden, self._fits, strict=True)
            if states is not None
        ]

    def select(self, rows: Tensor) -> None:
        self._unread = [self._unread[i] for i in rows.tolist()]
        self._fits = [self._fits[i] for i in rows.tolist()]
        if self._past is None:
            return  # no text fits
        self._past = tuple(part[rows] for part in self._past)
        self._held, self._last = self._held[rows], self._last[rows]

    def _read_committed(self, texts: Sequence[Tensor]) -> None:
        """Read the committed tokens that are new: every text that fits has some, or none has."""
        model, counts = self._draft.model, [len(states) for states in self._unread]
        if not max(counts):
            return
        new = [text[0, text.shape[1] - n :].tolist() for text, n in zip(texts, counts, strict=True)]
        ids, fresh = right_aligned(new, texts[0].device)
        features = torch.zeros(*ids.shape, self._unread[0].shape[-1], dtype=model.dtype, device=ids.device)
        features[fresh] = torch.cat(self._unread).to(model.dtype)
        positions = (self._held.sum(-1, keepdim=True) + fresh.cumsum(-1) - 1).clamp(min=0)
        self._held = torch.cat([self._held, fresh], dim=1)
        T = ids.shape[1]
        self._last, self._past = model(
            self._embedded(ids), model.fc(features), positions, self._past, self._held[:, None, None], first=T - 1
        )
        longest = int(self._held.sum(-1).max())
        order = squeezed(self._held, longest)
        self._past = tuple(gathered(part, order) for part in self._past)
        self._held = self._held.gather(1, order)
        self._unread = [states[:0] for states in self._unread]

    def _embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._draft.embeddings(ids).to(self._draft.model.dtype)
        return embedded


def nothing(text: Tensor) -> Proposal:
    """No drafted token."""
    return Proposal(text[:, :0], torch.empty(1, 0, 0, device=text.device), 0.0)


def _proposals(
    texts: Sequence[Tensor], whole: Sequence[Tensor], laws: Sequence[Sequence[Tensor]], forward_s: float
) -> list[Proposal]:
    share = forward_s / len(texts)
    return [
        Proposal(longer[:, text.shape[1] :], torch.cat(list(some), dim=1), share) if some else nothing(text)
        for text, longer, some in zip(texts, whole, laws, strict=True)
    ]
