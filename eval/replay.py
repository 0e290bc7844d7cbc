"""Acceptance from teacher-forced passes over target-sampled text: no decoding, every γ from one pass.

Under the token rule P(x accepted | x emitted) = min(p, q)(x) / p(x) = min(1, q(x)/p(x)), so the law of where the
rounds of a given text end is known exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.verify import overlap


@dataclass(frozen=True)
class Replay:
    """One text: for each emitted token after the first, its chance to be accepted if drafted, and α there."""

    accept: list[float]
    overlap: list[float]


def replay_text(p: Tensor, q: Tensor, tokens: Tensor) -> Replay:
    """p, q [N, V] are the laws at the places of the emitted `tokens` [N]; the first token is prefill's."""
    p_emitted = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    q_emitted = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # A near-tie can make p 0 at a token that was emitted at T = 0: then the draft decides (1 if it agrees, else 0).
    accept = (q_emitted / p_emitted).nan_to_num(nan=0.0).clamp(max=1.0)
    return Replay(accept[1:].tolist(), overlap(p, q)[1:].tolist())


def alpha(texts: Sequence[Replay]) -> float:
    """α: mean Σ_v min(p, q) over the positions of the texts."""
    values = [value for text in texts for value in text.overlap]
    return sum(values) / len(values) if values else 0.0


def expected_rounds(accept: Sequence[float], num_draft_tokens: int) -> list[float]:
    """R[t], the probability that a round starts at token t, for γ = `num_draft_tokens`."""
    starts = [1.0, *[0.0] * (len(accept) - 1)] if accept else []
    for start, chance in enumerate(starts):
        for at in range(start, start + num_draft_tokens + 1):
            if at + 1 >= len(starts):
                break
            last = at == start + num_draft_tokens
            ends_here = chance if last else chance * (1 - accept[at])
            starts[at + 1] += ends_here
            chance *= accept[at]
    return starts


def tau(texts: Sequence[Replay], num_draft_tokens: int) -> float:
    """τ: tokens per target pass, Σ tokens ÷ Σ expected rounds (micro)."""
    tokens = sum(len(text.accept) for text in texts)
    rounds = sum(sum(expected_rounds(text.accept, num_draft_tokens)) for text in texts)
    return tokens / rounds if rounds else 1.0


def positions(texts: Sequence[Replay], num_draft_tokens: int) -> tuple[list[float], list[float]]:
    """Expected conditional a_j and joint A_j for j = 1..γ, over the rounds that have j tokens of text left."""
    offered, accepted, reached = ([0.0] * num_draft_tokens for _ in range(3))
    for text in texts:
        for start, chance in enumerate(expected_rounds(text.accept, num_draft_tokens)):
            through = chance
            for j, accept in enumerate(text.accept[start : start + num_draft_tokens]):
                offered[j] += chance
                reached[j] += through
                through *= accept
                accepted[j] += through
    conditional = [a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)]
    joint = [a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)]
    return conditional, joint
