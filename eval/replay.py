"""Acceptance from teacher-forced passes over target-sampled text: no decoding, every γ from one pass.

Given the text that was emitted, the chance that a round kept at least i drafted tokens is known exactly for each
verifier, and with it the law of where the rounds of that text begin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.trace import AtPosition
from decode.verify import overlap

LARGEST_RATIO = 1e12


@dataclass(frozen=True)
class Drafted:
    """For each emitted token after the first, were it drafted: s = q(x)/p(x), q(x), and α at its place."""

    ratio: list[float]
    q: list[float]
    overlap: list[float]


@dataclass(frozen=True)
class Replay:
    """One text. Item j of `drafted` is for tokens drafted as number j + 1 of a round, the last for all later ones.

    `ended` says that the text ended with an end token, not at a limit: then rounds drafted beyond its end.
    """

    drafted: list[Drafted]
    ended: bool = False

    def __len__(self) -> int:
        return len(self.drafted[0].ratio)

    def number(self, j: int) -> Drafted:
        """Of tokens drafted as number j + 1."""
        return self.drafted[min(j, len(self.drafted) - 1)]


def replay_text(p: Tensor, q: Iterable[Tensor], tokens: Tensor, ended: bool = False) -> Replay:
    """p [N, V] and each of q are the laws at the places of the emitted `tokens` [N]; the first token is prefill's.

    Item j of q is the law of a token that is drafted as number j + 1 of a round.
    """
    p_emitted = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    drafted = []
    for law in q:
        q_emitted = law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        # A near-tie can make p 0 at a token that was emitted at T = 0: then the draft decides (q > 0, or not).
        ratio = (q_emitted / p_emitted).nan_to_num(nan=0.0, posinf=LARGEST_RATIO).clamp(max=LARGEST_RATIO)
        drafted.append(Drafted(ratio[1:].tolist(), q_emitted[1:].tolist(), overlap(p, law)[1:].tolist()))
    return Replay(drafted, ended)


def overlaps(texts: Sequence[Replay], j: int = 0) -> list[float]:
    """Σ_v min(p, q) at each place of the texts where a token can be drafted as number j + 1 of a round."""
    return [value for text in texts for value in text.number(j).overlap[j:]]


def alpha(texts: Sequence[Replay]) -> float:
    """α: mean Σ_v min(p, q) over the positions of the texts, for the first drafted token of a round."""
    values = overlaps(texts)
    return sum(values) / len(values) if values else 0.0


def kept_chances(text: Replay, start: int, num_draft_tokens: int, verifier: str) -> list[float]:
    """P(at least i drafted tokens kept | the text) for i = 0..γ, for a round that starts at token `start`.

    token: Π min(1, s_k). block: the smallest of all Π_{k≤j} s_k with j ≤ i. match: Π q(x_k), for a draft that samples
    on its own. The list ends with the text.
    """
    chances, product = [1.0], 1.0
    for j, at in enumerate(range(start, min(start + num_draft_tokens, len(text)))):
        drafted = text.number(j)
        if verifier == "token":
            chances.append(chances[-1] * min(1.0, drafted.ratio[at]))
        elif verifier == "block":
            product *= drafted.ratio[at]
            chances.append(min(chances[-1], product))
        else:
            chances.append(chances[-1] * drafted.q[at])
    return chances


def expected_rounds(text: Replay, num_draft_tokens: int, verifier: str) -> list[float]:
    """R[t], the probability that a round starts at token t, for γ = `num_draft_tokens`."""
    starts = [1.0, *[0.0] * (len(text) - 1)] if len(text) else []
    for start, chance in enumerate(starts):
        kept = [*kept_chances(text, start, num_draft_tokens, verifier), 0.0]
        for accepted in range(min(len(kept) - 1, len(starts) - start - 1)):
            # The round emits `accepted` drafted tokens and one of the target's own.
            starts[start + accepted + 1] += chance * (kept[accepted] - kept[accepted + 1])
    return starts


def tau(texts: Sequence[Replay], num_draft_tokens: int, verifier: str) -> float:
    """τ: tokens per target pass, Σ tokens ÷ Σ expected rounds (micro)."""
    return tau_of(tau_parts(texts, num_draft_tokens, verifier))


def tau_parts(texts: Sequence[Replay], num_draft_tokens: int, verifier: str) -> list[tuple[float, float]]:
    """Of each text its tokens and expected rounds."""
    return [(float(len(text)), sum(expected_rounds(text, num_draft_tokens, verifier))) for text in texts]


def tau_of(parts: Sequence[tuple[float, float]]) -> float:
    """τ of texts with these tokens and rounds."""
    rounds = sum(rounds for _, rounds in parts)
    return sum(tokens for tokens, _ in parts) / rounds if rounds else 1.0


def at_positions(text: Replay, num_draft_tokens: int, verifier: str) -> list[AtPosition]:
    """Expected counts for positions 1..γ of the block.

    As in decoding, a round never drafts the last token that a limit allows.
    """
    offered, accepted, reached = ([0.0] * num_draft_tokens for _ in range(3))
    for start, chance in enumerate(expected_rounds(text, num_draft_tokens, verifier)):
        kept = kept_chances(text, start, num_draft_tokens, verifier)
        for j in range(num_draft_tokens):
            if not (text.ended or start + j + 1 < len(text)):
                break
            offered[j] += chance
            if j + 1 < len(kept):
                reached[j] += chance * kept[j]
                accepted[j] += chance * kept[j + 1]
    return [AtPosition(*counts) for counts in zip(offered, reached, accepted, strict=True)]


def positions(texts: Sequence[Replay], num_draft_tokens: int, verifier: str) -> tuple[list[float], list[float]]:
    """Expected conditional a_j and joint A_j for j = 1..γ, over the rounds that draft j tokens."""
    conditional, joint = [], []
    for at in zip(*(at_positions(text, num_draft_tokens, verifier) for text in texts), strict=True):
        offered, reached, accepted = (
            sum(getattr(one, name) for one in at) for name in ("offered", "reached", "accepted")
        )
        conditional.append(accepted / reached if reached else 0.0)
        joint.append(accepted / offered if offered else 0.0)
    return conditional, joint
