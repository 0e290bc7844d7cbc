"""What happened in each round, and the counts that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One propose-verify-commit round, cut at the end of the answer.

    `tokens` are what it emitted: `accepted` drafted ones, then the target's own (none after a cut inside the
    block). `p` and `q` are the probabilities of each drafted token, `overlap` is Σ_v min(p, q) at its place,
    `p_entropy` and `q_entropy` are those of the two laws there, in nats (0 where a law is greedy).
    `draft_s` is all of the drafting, `draft_forward_s` the draft's forwards in it; `verify_s` is the target's forward.
    """

    drafted: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    overlap: tuple[float, ...]
    p_entropy: tuple[float, ...]
    q_entropy: tuple[float, ...]
    draft_s: float
    draft_forward_s: float
    verify_s: float
    round_s: float

    @property
    def reached(self) -> int:
        """Drafted positions that were put to the test: those accepted, and the rejected one if there was one."""
        own_token = len(self.tokens) > self.accepted
        return self.accepted + (1 if own_token and self.accepted < len(self.drafted) else 0)


@dataclass(frozen=True)
class Tally:
    """Counts over rounds. The token that prefill gave is in none of them."""

    rounds: int
    drafted: int
    accepted: int
    emitted: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Tally":
        return cls(
            rounds=len(rounds),
            drafted=sum(len(r.drafted) for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            emitted=sum(len(r.tokens) for r in rounds),
        )

    @property
    def tau(self) -> float | None:
        """τ, tokens emitted per target pass: the target's own token is in, the prefill token out."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def accepted_share(self) -> float | None:
        """d, accepted ÷ drafted; absent when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class AtPosition:
    """Rounds that drafted a token at one position of the block, reached it (all before accepted), and accepted it."""

    offered: float
    reached: float
    accepted: float


def at_positions(rounds: Sequence[Round]) -> list[AtPosition]:
    """For positions 1, 2, ... of the block. A position that a stop cut off was not reached."""
    longest = max((len(r.drafted) for r in rounds), default=0)
    return [
        AtPosition(
            offered=sum(len(r.drafted) >= j for r in rounds),
            reached=sum(r.reached >= j for r in rounds),
            accepted=sum(r.accepted >= j for r in rounds),
        )
        for j in range(1, longest + 1)
    ]


def positions(rounds: Sequence[Round]) -> tuple[list[float | None], list[float | None]]:
    """Acceptance by position: conditional a_j = accepted ÷ reached, and joint A_j = accepted ÷ offered."""
    found = at_positions(rounds)
    return (
        [at.accepted / at.reached if at.reached else None for at in found],
        [at.accepted / at.offered if at.offered else None for at in found],
    )
