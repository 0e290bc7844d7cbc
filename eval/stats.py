"""Intervals over prompts: rounds of one prompt are not independent, prompts are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

FEWEST_PROMPTS = 5


@dataclass(frozen=True)
class Timed:
    """What one arm took for one prompt."""

    seconds: float
    tokens: int


def speedup(plain: Sequence[Timed], other: Sequence[Timed]) -> float:
    """Σ plain time ÷ Σ other time over the same prompts, per token where the answers differ in length."""
    plain_s, plain_tokens, other_s, other_tokens = _columns(plain, other)
    return float(_ratio(plain_s, plain_tokens, other_s, other_tokens))


def speedup_interval(plain: Sequence[Timed], other: Sequence[Timed], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of `speedup`: paired bootstrap over prompts (percentile, 2,000 resamples).

    None below `FEWEST_PROMPTS`: resampling so few prompts shows a certainty that is not there.
    """
    timed = [(a, b) for a, b in zip(plain, other, strict=True) if a.tokens and b.tokens]
    if len(timed) < FEWEST_PROMPTS:
        return None
    plain, other = [a for a, _ in timed], [b for _, b in timed]
    found = bootstrap(
        _columns(plain, other), _ratio, paired=True, vectorized=True, n_resamples=2000, method="percentile",
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _columns(plain: Sequence[Timed], other: Sequence[Timed]) -> tuple[np.ndarray, ...]:
    assert len(plain) == len(other)
    columns = zip(*((a.seconds, a.tokens, b.seconds, b.tokens) for a, b in zip(plain, other, strict=True)), strict=True)
    return tuple(np.array(column, dtype=float) for column in columns)


def _ratio(
    plain_s: np.ndarray,
    plain_tokens: np.ndarray,
    other_s: np.ndarray,
    other_tokens: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    plain_pace = plain_s.sum(axis) / plain_tokens.sum(axis)
    return plain_pace / (other_s.sum(axis) / other_tokens.sum(axis))
