"""Drafts without training: what stood after the same tokens before, in the prompt or in the answer.

Prompt lookup (Saxena 2023) with the longest match, as suffix decoding has it (Oliaro et al. 2024, arXiv 2411.04975).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from decode.drafts.contract import Draft, Proposal
from decode.draws import Draws
from decode.kv import Clock
from decode.laws import Law

LONGEST, SHORTEST = 8, 2  # tokens of a match
ENDLESS = 1 << 30  # context of a draft that reads nothing
CERTAIN = 1e4  # a logit beside zeros; a ban on its token leaves the others


@dataclass
class Matches:
    """Where each run of n tokens was seen last, n = SHORTEST..LONGEST, in a text that only grows."""

    text: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append(self, ids: list[int]) -> None:
        for token in ids:
            # The runs that end before `token` are entered only now, so that the end of the text never finds itself.
            for n in range(SHORTEST, min(LONGEST, len(self.text)) + 1):
                self.ends[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def longest(self) -> tuple[int, int]:
        """The longest run at the text's end that was seen before: its length, and the place after it; or (0, 0)."""
        for n in range(min(LONGEST, len(self.text)), SHORTEST - 1, -1):
            end = self.ends.get(tuple(self.text[-n:]))
            if end is not None:
                return n, end
        return 0, 0

    def following(self, place: int, tokens: int) -> list[int]:
        """What stood at `place` and after it; beyond the text's end it goes round, as a loop does."""
        period = len(self.text) - place
        return [self.text[place + i % period] for i in range(tokens)]

    def clone(self) -> "Matches":
        return Matches(list(self.text), dict(self.ends))


@dataclass
class LookupState:
    """The committed text with its runs."""

    matches: Matches
    device: torch.device

    def clone(self) -> "LookupState":
        return replace(self, matches=self.matches.clone())


class LookupDraft:
    """Proposes what followed the longest run of tokens that the text's end repeats, and nothing where it repeats none.

    It has no weights and no law: q is one-hot at what it proposes. `rows` are the target's.
    """

    taps: tuple[int, ...] = ()
    context_tokens = ENDLESS

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.model: Any = nn.Module()
        self.temperatures: Mapping[float, float] = {}

    def in_float32(self) -> "LookupDraft":
        return self

    def compiled(self, compile_model: Callable[[Any], Any]) -> "LookupDraft":
        return self

    def start(self, text: Tensor, hidden: Tensor | None = None, clock: Clock = perf_counter) -> LookupState:
        state = LookupState(Matches(), text.device)
        state.matches.append(text[0].tolist())
        return state

    def propose(self, state: LookupState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        length, place = state.matches.longest()
        tokens = state.matches.following(place, num_tokens) if length else []
        drafted = torch.tensor([tokens], dtype=torch.long, device=state.device)
        return Proposal(drafted, nn.functional.one_hot(drafted, self.rows).to(torch.float32), forward_s=0.0)

    def resume(
        self, state: LookupState, text: Tensor, hidden: Tensor | None, length: int, clock: Clock = perf_counter
    ) -> LookupState:
        return self.start(text)

    def commit(self, state: LookupState, ids: Tensor, hidden: Tensor | None = None) -> None:
        state.matches.append(ids[0].tolist())

    def replayed(self, text: Tensor, hidden: Tensor | None, places: Tensor, steps: int) -> Iterator[Tensor]:
        """Where nothing matches it would draft nothing; then all ids are alike, of which none will often be right."""
        chains, matches = [], Matches()  # what it would draft after each place
        for token in text[0].tolist():
            matches.append([token])
            length, start = matches.longest()
            chains.append(matches.following(start, steps) if length else [])
        for step in range(steps):
            logits = torch.zeros(1, len(places), self.rows, device=text.device)
            for row, place in enumerate(places.tolist()):
                chain = chains[place - step] if place >= step else []
                if chain:
                    logits[0, row, chain[step]] = CERTAIN
            yield logits


@dataclass
class Record:
    """Of one source of proposals: how often its j-th token was reached and accepted, over all j.

    One that was passed over `patience` times is tried again, and then after twice as many.
    """

    reached: float = 2.0
    accepted: float = 1.0
    idle: int = 0
    patience: int = 16

    def expected(self, tokens: int) -> float:
        """Accepted tokens to be expected of `tokens` proposed ones: a + a² + ..."""
        a = self.accepted / self.reached
        return sum(a**j for j in range(1, tokens + 1))

    def is_due(self) -> bool:
        """Take note of having been passed over; whether it is to be tried all the same."""
        self.idle += 1
        if self.idle < self.patience:
            return False
        self.idle, self.patience = 0, 2 * self.patience
        return True

    def learn(self, proposed: list[int], kept: list[int]) -> None:
        """`kept` are the tokens that the round emitted."""
        right = next((i for i, (a, b) in enumerate(zip(proposed, kept, strict=False)) if a != b), None)
        agreed = min(len(proposed), len(kept)) if right is None else right
        self.accepted += agreed
        self.reached += agreed + (right is not None)


@dataclass
class PairedState:
    """Both sources, the records of each kind of match and of the draft (0), and which of them proposed last.

    `draft` is None once the text has outgrown what the draft can follow.
    """

    lookup: LookupState
    draft: Any
    records: dict[int, Record] = field(default_factory=dict)
    proposed: tuple[int, list[int]] = (0, [])

    def clone(self) -> "PairedState":
        records = {length: replace(record) for length, record in self.records.items()}
        return PairedState(self.lookup.clone(), self.draft and self.draft.clone(), records, self.proposed)


class LookupOrDraft:
    """Looks up when there is a match of which this text's rounds so far promise more than of the draft; else drafts.

    Which one proposes depends on finished rounds alone, so the output keeps its law.
    """

    context_tokens = ENDLESS

    def __init__(self, lookup: LookupDraft, draft: Draft[Any]) -> None:
        self.lookup, self.draft = lookup, draft
        self.model, self.taps, self.temperatures = draft.model, draft.taps, draft.temperatures

    def in_float32(self) -> "LookupOrDraft":
        return LookupOrDraft(self.lookup, self.draft.in_float32())

    def compiled(self, compile_model: Callable[[Any], Any]) -> "LookupOrDraft":
        return LookupOrDraft(self.lookup, self.draft.compiled(compile_model))

    def start(self, text: Tensor, hidden: Tensor | None = None, clock: Clock = perf_counter) -> PairedState:
        fits = text.shape[1] <= self.draft.context_tokens
        return PairedState(self.lookup.start(text), self.draft.start(text, hidden, clock) if fits else None)

    def resume(
        self, state: PairedState, text: Tensor, hidden: Tensor | None, length: int, clock: Clock = perf_counter
    ) -> PairedState | None:
        fits = state.draft is not None and text.shape[1] <= self.draft.context_tokens
        draft = self.draft.resume(state.draft, text, hidden, length, clock) if fits else None
        return PairedState(self.lookup.start(text), draft) if draft is not None else None

    def propose(self, state: PairedState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        length, _ = state.lookup.matches.longest()
        room = self.draft.context_tokens + 1 - len(state.lookup.matches.text)
        if room < 1:
            state.draft = None
        draft, match = (state.records.setdefault(source, Record()) for source in (0, length))
        drafts = state.draft is not None
        if drafts and length:
            drafts = match.expected(num_tokens) < draft.expected(min(num_tokens, room)) and not match.is_due()
        proposal: Proposal = (
            self.draft.propose(state.draft, min(num_tokens, room), law, draws)
            if drafts
            else self.lookup.propose(state.lookup, num_tokens, law, draws)
        )
        state.proposed = (0 if drafts else length), proposal.tokens[0].tolist()
        return proposal

    def commit(self, state: PairedState, ids: Tensor, hidden: Tensor | None = None) -> None:
        source, tokens = state.proposed
        state.records.setdefault(source, Record()).learn(tokens, ids[0].tolist())
        state.proposed = 0, []
        self.lookup.commit(state.lookup, ids)
        if state.draft is not None:
            self.draft.commit(state.draft, ids, hidden)

    def replayed(self, text: Tensor, hidden: Tensor | None, places: Tensor, steps: int) -> Iterator[Tensor]:
        """The draft's own: which of the two proposes is known only while decoding."""
        return self.draft.replayed(text, hidden, places, steps)
