"""One round: the draft proposes, the target verifies, both commit. Every decoder path goes through here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Draft, Proposal
from decode.draws import Draws
from decode.kv import Clock, Reader
from decode.laws import Law
from decode.trace import Round
from decode.verify import Verifier, overlap


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
    drafted_text = torch.cat([pair.text, proposal.tokens], dim=1)
    verify_began_s = pair.target.forward_s
    logits = pair.target.read(drafted_text[:, pair.target.length :])
    p = rules.target_law(logits, drafted_text)
    q = proposal.q.to(p.dtype)
    accepted, own_token = rules.verify(p, q, proposal.tokens, rules.draws, pair.text.shape[1])

    K = proposal.tokens.shape[1]
    numbers = _read_once(p, q, proposal.tokens, accepted, own_token)
    num_accepted, drafted = int(numbers[0]), [int(x) for x in numbers[2 : 2 + K]]
    tokens = [*drafted[:num_accepted], int(numbers[1])]
    tokens = tokens[: keep(tokens)]
    _commit(pair, tokens)
    p_drafted, q_drafted, overlaps = (tuple(numbers[2 + i * K : 2 + (i + 1) * K]) for i in (1, 2, 3))
    return Round(
        drafted=tuple(drafted),
        accepted=min(num_accepted, len(tokens)),
        tokens=tuple(tokens),
        p=p_drafted,
        q=q_drafted,
        overlap=overlaps,
        draft_s=proposed - began,
        draft_forward_s=proposal.forward_s,
        verify_s=pair.target.forward_s - verify_began_s,
        round_s=clock() - began,
    )


def _propose(pair: Pair, num_draft_tokens: int, rules: Rules) -> Proposal:
    if pair.draft is None or num_draft_tokens == 0:
        return Proposal(pair.text[:, :0], q=torch.empty(1, 0, 0, device=pair.text.device), forward_s=0.0)
    return pair.draft.propose(pair.draft_state, num_draft_tokens, rules.draft_law, rules.draws)


def _read_once(p: Tensor, q: Tensor, drafted: Tensor, accepted: Tensor, own_token: Tensor) -> list[float]:
    """Everything the host needs, in one transfer. Token ids are exact in float64."""
    columns = [accepted.unsqueeze(-1), own_token.unsqueeze(-1), drafted]
    K = drafted.shape[1]
    if K:
        rows, p = drafted.unsqueeze(-1), p[:, :K]
        columns += [p.gather(-1, rows).squeeze(-1), q.gather(-1, rows).squeeze(-1), overlap(p, q)]
    return torch.cat([column.double() for column in columns], dim=1)[0].tolist()


def _commit(pair: Pair, tokens: Sequence[int]) -> None:
    ids = torch.tensor([tokens], device=pair.text.device)
    pair.text = torch.cat([pair.text, ids], dim=1)
    pair.target.rewind(pair.text.shape[1] - 1)
    if pair.draft is not None:
        pair.draft.commit(pair.draft_state, ids)
