"""Intervals over prompts: rounds of one prompt are not independent, prompts are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_PROMPTS = 5
RESAMPLES = 2000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Timed:
    """What one arm took for one prompt."""

    seconds: float
    tokens: int


def speedup(plain: Sequence[Timed], other: Sequence[Timed]) -> float | None:
    """Σ plain time ÷ Σ other time over the same prompts, per token where the answers differ in length.

    Prompts without tokens in either arm do not count; None where no prompt is left.
    """
    columns = _columns(plain, other)
    return float(_speedup(columns.sum(0))) if len(columns) else None


def speedup_interval(plain: Sequence[Timed], other: Sequence[Timed]) -> Interval | None:
    """95 % interval of `speedup`: paired bootstrap over prompts. None for too few."""
    sums = resampled(_columns(plain, other))
    return None if sums is None else interval(_speedup(sums))


def ratio_interval(parts: Sequence[tuple[float, float]]) -> Interval | None:
    """95 % interval of Σ numerator ÷ Σ denominator, one pair for each prompt. None for too few."""
    counted = [part for part in parts if part[1]]
    sums = resampled(np.array(counted, dtype=float)) if counted else None
    return None if sums is None else interval(sums[:, 0] / sums[:, 1])


def resampled(columns: np.ndarray, seed: int = 0) -> np.ndarray | None:
    """Sums over prompts drawn with replacement: one row of `columns` [prompts, n] for each prompt -> [resamples, n].

    None below `FEWEST_PROMPTS`: resampling so few prompts shows a certainty that is not there.
    """
    count = len(columns)
    if count < FEWEST_PROMPTS:
        return None
    picks = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    sums: np.ndarray = columns[picks].sum(1)
    return sums


def median_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the median of repeated timings, by bootstrap over them."""
    picks = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return interval(np.median(np.array(values, dtype=float)[picks], axis=1))


def interval(values: np.ndarray) -> Interval:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _columns(plain: Sequence[Timed], other: Sequence[Timed]) -> np.ndarray:
    pairs = [(a, b) for a, b in zip(plain, other, strict=True) if a.tokens and b.tokens]
    return np.array([(a.seconds, a.tokens, b.seconds, b.tokens) for a, b in pairs], dtype=float)


def _speedup(sums: np.ndarray) -> np.ndarray:
    plain_s, plain_tokens, other_s, other_tokens = np.moveaxis(sums, -1, 0)
    pace: np.ndarray = (plain_s / plain_tokens) / (other_s / other_tokens)
    return pace
