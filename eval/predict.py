"""The speed-up that acceptance and latency together promise, for every draft length, and what it takes to pay."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel
from scipy.optimize import brentq

from decode.length import Costs
from eval.replay import Drafted, Replay, tau, tau_of, tau_parts
from eval.stats import Interval, ratio_interval


class Prediction(BaseModel):
    """S for one γ: replayed τ ÷ the cost of a round in plain steps; the interval is that of the texts.

    `break_even` is the acceptance, the same at each position, with which it would be 1; None where none is enough.
    """

    num_draft_tokens: int
    tau: float
    speedup: float
    speedup_ci: Interval | None
    break_even: float | None


class Oracle(BaseModel):
    """The most that verifying can give: a draft that costs nothing and is always right, at its best γ."""

    num_draft_tokens: int
    speedup: float


def predict(texts: Sequence[Replay], costs: Costs, verifier: str) -> list[Prediction]:
    """S(γ) = τ(γ) / (γ·c + v(γ+1) + o) for every γ whose v was measured (Leviathan et al. 2023, theorem 3.8)."""
    found = []
    for gamma in _lengths(costs):
        cost = costs.round_cost(gamma, unread_tokens=1)
        parts = tau_parts(texts, gamma, verifier)
        expected, interval = tau_of(parts), ratio_interval(parts)
        found.append(
            Prediction(
                num_draft_tokens=gamma,
                tau=expected,
                speedup=expected / cost,
                speedup_ci=(interval[0] / cost, interval[1] / cost) if interval else None,
                break_even=break_even(gamma, cost),
            )
        )
    return found


def best_length(predictions: Sequence[Prediction]) -> int:
    """The γ with the largest predicted speed-up."""
    return max(predictions, key=lambda prediction: prediction.speedup).num_draft_tokens


def break_even(num_draft_tokens: int, round_cost: float) -> float | None:
    """The a with 1 + a + ... + a^γ = the cost of a round in plain steps, to 1e-6; None above γ + 1, 0 below 1."""
    if round_cost > num_draft_tokens + 1:
        return None
    if round_cost <= 1:
        return 0.0
    return float(brentq(lambda a: sum(a**j for j in range(num_draft_tokens + 1)) - round_cost, 0.0, 1.0, xtol=1e-6))


def oracle(texts: Sequence[Replay], costs: Costs) -> Oracle:
    """Of the same texts: they end where they end, so that even a perfect draft loses its last round's rest."""
    perfect = [replace(text, drafted=[_perfect(text)]) for text in texts]
    return max(
        (
            Oracle(num_draft_tokens=gamma, speedup=tau(perfect, gamma, "token") / (costs.v[gamma + 1] + costs.o))
            for gamma in _lengths(costs)
        ),
        key=lambda found: found.speedup,
    )


def _perfect(text: Replay) -> Drafted:
    ones = [1.0] * len(text)
    return Drafted(ones, ones, ones)


def _lengths(costs: Costs) -> list[int]:
    return [width - 1 for width in sorted(costs.v) if width > 1]
