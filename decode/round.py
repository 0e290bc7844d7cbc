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
    accepted, own, drafted, p, q, overlaps, p_entropy, q_entropy = _verify(pair, proposal, rules)
    tokens = [int(token) for token in [*drafted[: int(accepted[0])], own[0]]]
    tokens = tokens[: keep(tokens)]
    _commit(pair, tokens)
    return Round(
        drafted=tuple(int(token) for token in drafted),
        accepted=min(int(accepted[0]), len(tokens)),
        tokens=tuple(tokens),
        p=p,
        q=q,
        overlap=overlaps,
        p_entropy=p_entropy,
        q_entropy=q_entropy,
        draft_s=proposed - began,
        draft_forward_s=proposal.forward_s,
        verify_s=pair.target.forward_s - verify_began_s,
        round_s=clock() - began,
    )


def _propose(pair: Pair, num_draft_tokens: int, rules: Rules) -> Proposal:
    if pair.draft is None or num_draft_tokens == 0:
        return Proposal(pair.text[:, :0], q=torch.empty(1, 0, 0, device=pair.text.device), forward_s=0.0)
    return pair.draft.propose(pair.draft_state, num_draft_tokens, rules.draft_law, rules.draws)


def _verify(pair: Pair, proposal: Proposal, rules: Rules) -> list[tuple[float, ...]]:
    """One target pass: how many were accepted, the target's own token, the drafted ones, their `_probabilities`."""
    text = torch.cat([pair.text, proposal.tokens], dim=1)
    p = rules.target_law(pair.target.read(text[:, pair.target.length :]), text)
    position, drafted, K = pair.text.shape[1], proposal.tokens, proposal.tokens.shape[1]
    if not K:
        own_token = rules.draws.choose(p, position)
        return _read_once([torch.zeros_like(own_token), own_token, *[drafted] * 6])
    q = proposal.q.to(p.dtype)
    accepted, own_token = rules.verify(p, q, drafted, rules.draws, position)
    probabilities = _probabilities(p[:, :K], q, drafted, rules)
    return _read_once([accepted.unsqueeze(-1), own_token.unsqueeze(-1), drafted, *probabilities])


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
