"""How many tokens to draft in the next round: fixed, or what a frozen latency profile says will pay."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from configs.errors import UserError
from decode.trace import Round


@dataclass(frozen=True)
class Costs:
    """A frozen latency profile, in plain steps: c a draft step, o the rest of a round, v(n) verifying n tokens."""

    c: float
    o: float
    v: Mapping[int, float]

    def __post_init__(self) -> None:
        widths = sorted(self.v)
        if len(widths) < 2 or widths != list(range(1, len(widths) + 1)):
            raise UserError(f"a latency profile needs v(n) for n = 1, 2, ... without a gap, got n = {widths}")

    def round_cost(self, num_draft_tokens: int, unread_tokens: int) -> float:
        """Cost of a round. Its first draft step reads `unread_tokens` at once, which costs what it does a target."""
        if num_draft_tokens == 0:
            return 1.0
        catch_up = self.c * (self.v[min(unread_tokens, max(self.v))] - self.v[1])
        return num_draft_tokens * self.c + catch_up + self.v[num_draft_tokens + 1] + self.o


def read_costs(report: Path) -> Costs:
    """The latency profile in a report.json or a profile.json. Raises UserError when there is none."""
    try:
        latency = json.loads(report.read_text(encoding="utf-8"))["latency"]
        widths = {int(width): float(cost) for width, cost in latency["verify_by_width"].items()}
        return Costs(float(latency["c"]), float(latency["o"]), widths)
    except OSError:
        raise UserError(
            f"{report}: no such report; run eval on this machine, or give a number of draft tokens"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f"{report}: holds no latency profile; expected a report.json (eval) or a profile.json"
        ) from None


class LengthPolicy(Protocol):
    """Decides from past rounds alone, never from the tokens it is deciding about: that keeps decoding lossless."""

    def start(self) -> "LengthPolicy":
        """A fresh policy for one call: nothing is carried over from another."""
        ...

    def next_length(self) -> int:
        """Tokens to draft in the next round; 0 is a plain step."""
        ...

    def learn(self, done: Round) -> None:
        """Take note of a finished round."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same γ."""

    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise UserError(
                f"num_draft_tokens {self.num_draft_tokens}: expected 1 or more; leave out the draft to decode plainly"
            )

    def start(self) -> "Fixed":
        return self

    def next_length(self) -> int:
        return self.num_draft_tokens

    def learn(self, done: Round) -> None:
        pass


@dataclass
class Auto:
    """γ with the largest expected tokens per cost, from this call's acceptance by position and a frozen profile.

    Each position starts from `prior` acceptance with the weight of `prior_rounds` rounds. Once plain steps win, the
    draft is tried again with one token after 16, 32, 64, ... of them, so that a draft that never pays costs little and
    one that starts to pay is noticed.
    """

    costs: Costs
    prior: float = 0.4
    prior_rounds: float = 3.0
    _accepted: dict[int, float] = field(default_factory=dict)
    _reached: dict[int, float] = field(default_factory=dict)
    _plain_steps: int = 0
    _patience: int = 16

    def start(self) -> "Auto":
        return Auto(self.costs, self.prior, self.prior_rounds)

    def next_length(self) -> int:
        longest = max(self.costs.v) - 1
        best = max(range(longest + 1), key=self._pace)
        if best == 0 and self._plain_steps >= self._patience:
            self._patience *= 2
            return 1
        return best

    def learn(self, done: Round) -> None:
        self._plain_steps = 0 if done.drafted else self._plain_steps + 1
        for j in range(1, done.reached + 1):
            self._reached[j] = self._reached.get(j, 0) + 1
            self._accepted[j] = self._accepted.get(j, 0) + (done.accepted >= j)

    def _pace(self, num_draft_tokens: int) -> float:
        tokens = through = 1.0
        for j in range(1, num_draft_tokens + 1):
            through *= self._acceptance(j)
            tokens += through
        return tokens / self.costs.round_cost(num_draft_tokens, 1 + self._plain_steps)

    def _acceptance(self, j: int) -> float:
        # A position that was seldom reached leans on the one before it.
        before = self.prior if j == 1 else self._acceptance(j - 1)
        seen = self._reached.get(j, 0)
        return (self._accepted.get(j, 0) + self.prior_rounds * before) / (seen + self.prior_rounds)
