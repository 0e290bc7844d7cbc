"""The speed-up that acceptance and latency together promise, for every draft length."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.latency import Latency
from eval.replay import Replay, tau


@dataclass(frozen=True)
class Prediction:
    """S for one γ: replayed τ ÷ the cost of a round in plain steps."""

    num_draft_tokens: int
    tau: float
    speedup: float


def predict(texts: Sequence[Replay], latency: Latency, verifier: str) -> list[Prediction]:
    """S(γ) = τ(γ) / (γ·c + v(γ+1) + o) for every γ whose v was measured (Leviathan et al. 2023, theorem 3.8)."""
    found = []
    for width, v in sorted(latency.verify_by_width.items()):
        gamma = width - 1
        if gamma >= 1:
            expected = tau(texts, gamma, verifier)
            found.append(Prediction(gamma, expected, expected / (gamma * latency.c + v + latency.o)))
    return found


def best_length(predictions: Sequence[Prediction]) -> int:
    """The γ with the largest predicted speed-up."""
    return max(predictions, key=lambda prediction: prediction.speedup).num_draft_tokens
