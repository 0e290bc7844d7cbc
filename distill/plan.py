"""Will a draft pay here, and which one? Answered from measured costs, before anything is trained.

S(γ) = (1 + Σ_j Π_{i≤j} a_i) / (γ·c + v(γ+1) + o), with a_i the acceptance at position i.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import t as student_t

from decode.length import Costs
from distill.logit_cache import bytes_per_token
from distill.shape import DraftSettings
from eval.profile_file import LatencyProfile, ShapeCost

WORTH_IT = 1.1  # below this at the upper end of its interval, a draft is not worth its training
TOP_K, TAPS = 64, 3  # of the cache whose disk is estimated
CONFIDENCE = 0.95
PASSES = 3  # of training over the data


class Range(BaseModel):
    """A value with the ends of its interval."""

    low: float
    middle: float
    high: float


class Acceptance(BaseModel):
    """What is expected of a draft: a_1, and each later position's acceptance ÷ a_1 (the last for all after it)."""

    first: Range
    later: list[float]

    def at(self, alpha: float, positions: int) -> list[float]:
        """a_1 .. a_n where a_1 is `alpha`."""
        ratios = [1.0, *self.later]
        return [min(1.0, alpha * ratios[min(j, len(ratios) - 1)]) for j in range(positions)]


class Candidate(BaseModel):
    """One shape of draft: what it costs, the most that its head allows, and what may be expected of it."""

    name: str
    draft: dict[str, Any]
    c: float
    ceiling: float
    break_even: float | None
    num_draft_tokens: int
    speedup: Range
    piloted: bool
    tokens: int
    hours: float
    disk_gib: float


class Plan(BaseModel):
    """The candidates, best first, and for each batch size the best S; `verdict` is the advice in one line."""

    verdict: str
    speculate: bool | None
    candidates: list[Candidate]
    by_batch: dict[int, Candidate]


def speedup(costs: Costs, acceptance: Sequence[float]) -> float:
    """S for γ = len(acceptance)."""
    gamma, kept, tau = len(acceptance), 1.0, 1.0
    for chance in acceptance:
        kept *= chance
        tau += kept
    return tau / costs.round_cost(gamma, unread_tokens=1)


def best_speedup(costs: Costs, acceptance: Acceptance, alpha: float) -> tuple[int, float]:
    """The γ of the largest S where a_1 is `alpha`, and that S."""
    best, gamma = max((speedup(costs, acceptance.at(alpha, gamma)), gamma) for gamma in range(1, max(costs.v)))
    return gamma, best


def break_even(costs: Costs, acceptance: Acceptance) -> float | None:
    """The least a_1 with which some γ gives S = 1, to 1e-4; None where a_1 = 1 is not enough."""

    def gain(alpha: float) -> float:
        return best_speedup(costs, acceptance, alpha)[1] - 1

    if gain(1.0) < 0:
        return None
    return float(brentq(gain, 0.0, 1.0, xtol=1e-4)) if gain(0.0) < 0 else 0.0


def extrapolate(points: Sequence[tuple[float, float]], tokens: float, ceiling: float) -> Range:
    """α after `tokens` from measured (tokens, α): a line of its log-odds over log tokens, with a 95 % interval.

    By least squares; the interval is that of a new observation, so it grows with the distance from the measured points.
    It ends at the head's `ceiling`.
    """
    assert len(points) >= 3, "a line with an interval needs three points"
    x = np.log([n for n, _ in points])
    y = logit(np.clip([alpha for _, alpha in points], 1e-4, 1 - 1e-4))
    slope, start = np.polyfit(x, y, 1)
    left, free = y - (start + slope * x), len(points) - 2
    at = math.log(tokens) - x.mean()
    error = math.sqrt(float(left @ left) / free * (1 + 1 / len(x) + at**2 / float(((x - x.mean()) ** 2).sum())))
    middle, reach = start + slope * math.log(tokens), error * float(student_t.ppf((1 + CONFIDENCE) / 2, free))
    low, middle, high = (min(float(expit(odds)), ceiling) for odds in (middle - reach, middle, middle + reach))
    return Range(low=low, middle=middle, high=high)


def unknown(ceiling: float) -> Acceptance:
    """Before anything is trained all that is known is that α lies between 0 and what the head allows."""
    return Acceptance(first=Range(low=0.0, middle=ceiling, high=ceiling), later=[])


def make_plan(
    profile: LatencyProfile, ceilings: Mapping[str, float], piloted: Mapping[str, Acceptance], budget_tokens: int,
    batch_rows: int = 1,
) -> Plan:  # fmt: skip
    """The advice is for `batch_rows` rows at once.

    `ceilings` are the largest α of each shape's head (1 where nothing is known), `piloted` what pilots promise. The
    budget is of supervised tokens of data; training reads them `PASSES` times.
    """
    batches = {1: profile.latency, **profile.batches}
    by_batch: dict[int, list[Candidate]] = {}
    for batch, latency in batches.items():
        by_batch[batch] = []
        for shape in profile.shapes:
            c = shape.c * latency.c / profile.latency.c
            costs = Costs(c, shape.o * profile.latency.plain_step_s / latency.plain_step_s, latency.verify_by_width)
            ceiling = ceilings.get(shape.name, 1.0)
            expected = piloted.get(shape.name) or unknown(ceiling)
            by_batch[batch].append(
                _candidate(profile, shape, costs, ceiling, expected, shape.name in piloted, budget_tokens)
            )
        by_batch[batch].sort(key=_rank)
    candidates = by_batch[batch_rows]
    speculate, verdict = _advice(candidates)
    return Plan(
        verdict=verdict, speculate=speculate, candidates=candidates,
        by_batch={batch: found[0] for batch, found in by_batch.items()},
    )  # fmt: skip


def _rank(one: Candidate) -> tuple[bool, float]:
    """Piloted ones first, by what they promise; of the others the one that pays soonest."""
    if one.piloted:
        return False, -one.speedup.middle
    return True, 2.0 if one.break_even is None else one.break_even


def _candidate(
    profile: LatencyProfile, shape: ShapeCost, costs: Costs, ceiling: float, expected: Acceptance, piloted: bool,
    tokens: int,
) -> Candidate:  # fmt: skip
    gamma, middle = best_speedup(costs, expected, expected.first.middle)
    low, high = (speedup(costs, expected.at(alpha, gamma)) for alpha in (expected.first.low, expected.first.high))
    draft = DraftSettings.model_validate(shape.draft)
    steps, taps = (draft.unroll_steps, TAPS) if draft.kind == "eagle3" else (1, 0)
    facts = profile.target
    rate = facts.read_tokens_per_s * facts.flop  # operations a second, as the target reads
    seconds = tokens * (1 / facts.generated_tokens_per_s + 1 / facts.read_tokens_per_s)
    seconds += tokens * PASSES * 3 * steps * shape.flop / rate
    token_bytes = bytes_per_token(TOP_K, facts.vocabulary) + 2 * taps * facts.hidden_size
    return Candidate(
        name=shape.name, draft=shape.draft, c=costs.c, ceiling=ceiling, break_even=break_even(costs, expected),
        num_draft_tokens=gamma, speedup=Range(low=low, middle=middle, high=high), piloted=piloted, tokens=tokens,
        hours=seconds / 3600, disk_gib=tokens * token_bytes / 2**30,
    )  # fmt: skip


def _advice(candidates: Sequence[Candidate]) -> tuple[bool | None, str]:
    """True, False, or None where it cannot be told; and why."""
    most = max(candidates, key=lambda one: one.speedup.high)
    if most.speedup.high < WORTH_IT:
        return (
            False,
            f"do not speculate: no shape can reach {WORTH_IT}×, the best ({most.name}) {most.speedup.high:.2f}×",
        )
    piloted = [one for one in candidates if one.piloted]
    if not piloted:
        first = candidates[0]
        return None, f"cannot be told without pilots (--pilots): {first.name} {_pays(first)}"
    best = max(piloted, key=lambda one: one.speedup.middle)
    s = best.speedup
    said = f"{best.name}, γ = {best.num_draft_tokens}: S {s.middle:.2f}× [{s.low:.2f}, {s.high:.2f}]; it {_pays(best)}"
    if s.high < WORTH_IT:
        others = ", ".join(one.name for one in candidates if not one.piloted and one.speedup.high >= WORTH_IT)
        return None, f"not with {said}; untried: {others}"
    return (True, f"speculate: {said}") if s.low > 1 else (None, f"too close to tell: {said}")


def _pays(one: Candidate) -> str:
    return "cannot pay" if one.break_even is None else f"pays from α = {one.break_even:.2f} on"
