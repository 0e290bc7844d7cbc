"""One round: the draft proposes, the target verifies, both commit. Every decoder path goes through here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Draft, Proposal
from decode.draws import Draws
from decode.kv import Reader
from decode.laws import Law
from decode.trace import Round
from decode.verify import overlap, verify_by_token

Clock = Callable[[], float]


@dataclass
class Pair:
    """Target and draft on one text. The target has read every committed token but the last, `last` [1, 1].

    Without a draft each round is a plain decoding step.
    """

    target: Reader
    last: Tensor
    draft: Draft[Any] | None = None
    draft_state: Any = None


def play_round(
    pair: Pair, num_draft_tokens: int, law: Law, draws: Draws,
    keep: Callable[[Sequence[int]], int], clock: Clock = perf_counter,
) -> Round:  # fmt: skip
    """Propose `num_draft_tokens` (0: none), verify them in one target pass, commit what was accepted.

    `keep` says how many of the new tokens stay (an end-of-answer token inside the block cuts it). Afterwards
    the target has read every committed token but the last and the draft follows the committed text.
    """
    began = clock()
    proposal = _propose(pair, num_draft_tokens, law, draws)
    proposed = clock()
    logits = pair.target.read(torch.cat([pair.last, proposal.tokens], dim=1))
    verified = clock()
    p = law(logits)
    accepted, own_token = verify_by_token(p, proposal.q.to(p.dtype), proposal.tokens, draws)

    K = proposal.tokens.shape[1]
    numbers = _read_once(p[:, :K], proposal, accepted, own_token)
    num_accepted, drafted = int(numbers[0]), [int(x) for x in numbers[2 : 2 + K]]
    tokens = [*drafted[:num_accepted], int(numbers[1])]
    tokens = tokens[: keep(tokens)]
    _commit(pair, tokens, K)
    return Round(
        drafted=tuple(drafted),
        accepted=min(num_accepted, len(tokens)),
        tokens=tuple(tokens),
        p=tuple(numbers[2 + K : 2 + 2 * K]),
        q=tuple(numbers[2 + 2 * K : 2 + 3 * K]),
        overlap=tuple(numbers[2 + 3 * K :]),
        draft_s=proposed - began,
        verify_s=verified - proposed,
        round_s=clock() - began,
    )


def _propose(pair: Pair, num_draft_tokens: int, law: Law, draws: Draws) -> Proposal:
    if pair.draft is None or num_draft_tokens == 0:
        nothing = pair.last[:, :0]
        return Proposal(nothing, q=torch.empty(1, 0, 0, device=nothing.device))
    return pair.draft.propose(pair.draft_state, num_draft_tokens, law, draws)


def _read_once(p: Tensor, proposal: Proposal, accepted: Tensor, own_token: Tensor) -> list[float]:
    """Everything the host needs, in one transfer. Token ids are exact in float64."""
    columns = [accepted.unsqueeze(-1), own_token.unsqueeze(-1), proposal.tokens]
    if proposal.tokens.shape[1]:
        rows, q = proposal.tokens.unsqueeze(-1), proposal.q.to(p.dtype)
        columns += [p.gather(-1, rows).squeeze(-1), q.gather(-1, rows).squeeze(-1), overlap(p, q)]
    return torch.cat([column.double() for column in columns], dim=1)[0].tolist()


def _commit(pair: Pair, tokens: Sequence[int], num_drafted: int) -> None:
    before = pair.target.length - num_drafted  # committed tokens before this round, all read now
    pair.target.rewind(before + len(tokens) - 1)
    ids = torch.tensor([tokens], device=pair.last.device)
    pair.last = ids[:, -1:]
    if pair.draft is not None:
        pair.draft.commit(pair.draft_state, ids)
