"""One round: the draft proposes, the target verifies, both commit. Every decoder path goes through here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Draft, Proposal
from decode.draws import Draws
from decode.kv import Clock, Reader
from decode.laws import Law
from decode.trace import Round
from decode.verify import Verifier, entropy, overlap


@dataclass(frozen=True)
class Rules:
    """What stays the same from round to round. The draft's law may differ from the target's; the output may not."""

    target_law: Law
    draft_law: Law
    verify: Verifier
    draws: Draws


@dataclass
class Pair:
    """Target and draft on one text [1, L]. The target has read every committed token but the last.

    Without a draft each round is a plain decoding step.
    """

    target: Reader
    text: Tensor
    draft: Draft[Any] | None = None
    draft_state: Any = None


def play_round(
    pair: Pair, num_draft_tokens: int, rules: Rules, keep: Callable[[Sequence[int]], int], clock: Clock = perf_counter
) -> Round:
    """Propose `num_draft_tokens` (0: none), verify them in one target pass, commit what was accepted.

    `keep` says how many of the new tokens stay (an end inside the block cuts it). Afterwards the target has read
    every committed token but the last and the draft follows the committed text.
    """
    began = clock()
    proposal = _propose(pair, num_draft_tokens, rules)
    proposed = clock()
    verify_began_s = pair.target.forward_s
    text = torch.cat([pair.text, proposal.tokens], dim=1)
    verdict = judge(pair.target.read(text[:, pair.target.length :]), text, proposal, rules)
    tokens = verdict.tokens[: keep(verdict.tokens)]
    _commit(pair, tokens)
    verify_s = pair.target.forward_s - verify_began_s
    return verdict.as_round(tokens, proposed - began, proposal.forward_s, verify_s, clock() - began)


@dataclass(frozen=True)
class Verdict:
    """What verification found for one text: how many drafted tokens stand, the target's own, and `_probabilities`."""

    accepted: int
    own: int
    drafted: tuple[int, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    overlap: tuple[float, ...]
    p_entropy: tuple[float, ...]
    q_entropy: tuple[float, ...]

    @property
    def tokens(self) -> list[int]:
        """Those that the round emits, were there no end."""
        return [*self.drafted[: self.accepted], self.own]

    def as_round(
        self, tokens: Sequence[int], draft_s: float, draft_forward_s: float, verify_s: float, round_s: float
    ) -> Round:
        """The record of the round, of which `tokens` were kept."""
        return Round(
            drafted=self.drafted, accepted=min(self.accepted, len(tokens)), tokens=tuple(tokens), p=self.p, q=self.q,
            overlap=self.overlap, p_entropy=self.p_entropy, q_entropy=self.q_entropy, draft_s=draft_s,
            draft_forward_s=draft_forward_s, verify_s=verify_s, round_s=round_s,
        )  # fmt: skip


def _propose(pair: Pair, num_draft_tokens: int, rules: Rules) -> Proposal:
    if pair.draft is None or num_draft_tokens == 0:
        return Proposal(pair.text[:, :0], q=torch.empty(1, 0, 0, device=pair.text.device), forward_s=0.0)
    return pair.draft.propose(pair.draft_state, num_draft_tokens, rules.draft_law, rules.draws)


def judge(logits: Tensor, text: Tensor, proposal: Proposal, rules: Rules) -> Verdict:
    """Verify K drafted tokens by the target's logits [1, K + 1, V] for their places and the next one.

    text [1, L] ends with them.
    """
    p = rules.target_law(logits, text)
    drafted, K = proposal.tokens, proposal.tokens.shape[1]
    position = text.shape[1] - K
    if not K:
        own_token = rules.draws.choose(p, position)
        found = _read_once([torch.zeros_like(own_token), own_token, *[drafted] * 6])
    else:
        q = proposal.q.to(p.dtype)
        accepted, own_token = rules.verify(p, q, drafted, rules.draws, position)
        probabilities = _probabilities(p[:, :K], q, drafted, rules)
        found = _read_once([accepted.unsqueeze(-1), own_token.unsqueeze(-1), drafted, *probabilities])
    (kept,), (own,), ids, *rest = found
    return Verdict(int(kept), int(own), tuple(int(token) for token in ids), *rest)


def _probabilities(p: Tensor, q: Tensor, drafted: Tensor, rules: Rules) -> list[Tensor]:
    """For each drafted token [B, K]: p and q of it, and at its place the overlap and the entropies of p and q."""
    at = drafted.unsqueeze(-1)
    p_drafted, q_drafted = (law.gather(-1, at).squeeze(-1) for law in (p, q))
    entropies = [
        torch.zeros_like(p_drafted) if law.is_greedy else entropy(probs)
        for law, probs in ((rules.target_law, p), (rules.draft_law, q))
    ]
    return [p_drafted, q_drafted, overlap(p, q), *entropies]


def _read_once(columns: Sequence[Tensor]) -> list[tuple[float, ...]]:
    """Everything the host needs, in one transfer: the first row of each [B, n], integers before fractions."""
    whole = [column for column in columns if not column.is_floating_point()]
    fractions = [column for column in columns if column.is_floating_point()]
    parts = [torch.cat(some, dim=1).double() for some in (whole, fractions) if some]
    numbers = torch.cat(parts, dim=1)[0].tolist()
    ends = list(accumulate(column.shape[1] for column in columns))
    return [tuple(numbers[end - column.shape[1] : end]) for end, column in zip(ends, columns, strict=True)]


def _commit(pair: Pair, tokens: Sequence[int]) -> None:
    ids = torch.tensor([tokens], device=pair.text.device)
    pair.text = torch.cat([pair.text, ids], dim=1)
    pair.target.rewind(pair.text.shape[1] - 1)
    if pair.draft is not None:
        tapped = pair.target.tapped
        pair.draft.commit(pair.draft_state, ids, tapped if tapped is None else tapped[:, : ids.shape[1]])
