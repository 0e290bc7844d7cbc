"""The losslessness certificate in its simplest honest form: what was checked on this pair, and how it came out."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from decode.drafts.contract import Draft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import Loaded
from decode.quantise import in_float32
from decode.stops import StopWatch
from eval.live import PromptRun
from eval.sampled_check import SampledCheck, check_sampling
from eval.text import first_difference

NEAR_TIE_FP32 = 1e-4
ULPS_IN_RUN_DTYPE = 4  # two kernels, each off by one or two


class Certificate(BaseModel):
    """fp32_* compare greedy speculative with greedy plain decoding in float32, token by token.

    run_dtype_* put every greedy token that the measured run emitted through one plain forward: its logit may lie
    below the best one by no more than rounding explains. A run that sampled has `sampled` instead; its law is proved by
    enumeration in the tests (tests/test_decode_enumeration.py).
    """

    passed: bool
    fp32_prompts: int
    fp32_tokens: int
    fp32_equal_prompts: int
    fp32_near_ties: int
    fp32_failures: list[str]
    near_tie_bound: float
    run_dtype_tokens: int
    run_dtype_not_best: int
    run_dtype_largest_gap: float
    run_dtype_failures: list[str]
    tokens_after_stop: int
    sampled: SampledCheck | None
    proves: str


class Divergence(BaseModel):
    """A greedy answer that differs from the plain run's in the run dtype: the index of the first other token.

    `gap` lies between the scores of the two tokens in one plain pass. Up to `bound` it is a numeric tie, which two
    kernels may break either way. No gap: one answer goes on where the other ended.
    """

    id: str
    differs_from_plain_at: int
    gap: float | None
    bound: float
    numeric_tie: bool


def certify(
    target: Loaded,
    draft: Draft[Any],
    runs: Sequence[PromptRun],
    settings: Settings,
    gamma: int,
    fp32_prompts: int,
    fp32_tokens: int,
    law_samples: int,
) -> Certificate:
    """Check `fp32_prompts` of the runs again in float32 at γ = `gamma`, and all in the dtype they ran in."""
    exact_target = in_float32(target.model)
    exact_draft = draft.in_float32()
    greedy = Law(0.0, processors=settings.law.processors, vocabulary=settings.law.vocabulary)
    # γ is fixed here: a policy that gives up on a draft would leave nothing to check.
    again = replace(
        settings, law=greedy, draft_temperature=None, max_new_tokens=fp32_tokens, num_draft_tokens=gamma
    )  # fmt: skip
    equal = near_ties = compared = 0
    failures: list[str] = []
    for run in runs[:fp32_prompts]:
        plain, drafted = (
            generate_ids(exact_target, arm, run.prompt_ids, again, target.tokenizer).token_ids
            for arm in (None, exact_draft)
        )
        compared += len(plain)
        difference = first_difference(plain, drafted)
        if difference is None:
            equal += 1
        elif tie_gap(exact_target, run.prompt_ids, plain, drafted, difference, again).gap < NEAR_TIE_FP32:
            near_ties += 1
        else:
            failures.append(f"{run.prompt.id}: token {difference} differs and is no near-tie")
    gaps, beyond = _run_dtype_gaps(target.model, runs, settings)
    largest_gap = min(max(gaps, default=0.0), sys.float_info.max)  # JSON has no infinity
    after_stop = sum(_tokens_after_stop(run, settings, target.tokenizer) for run in runs)
    sampled = None
    if not settings.law.is_greedy:
        prompts = {run.prompt.id: run.prompt_ids for run in runs[:fp32_prompts]}
        sampling = replace(settings, max_new_tokens=fp32_tokens, num_draft_tokens=gamma)
        sampled = check_sampling(exact_target, exact_draft, prompts, sampling, law_samples, target.tokenizer)
    return Certificate(
        passed=not failures and not beyond and after_stop == 0 and not (sampled and sampled.failures),
        fp32_prompts=len(runs[:fp32_prompts]), fp32_tokens=compared, fp32_equal_prompts=equal,
        fp32_near_ties=near_ties, fp32_failures=failures, near_tie_bound=NEAR_TIE_FP32,
        run_dtype_tokens=len(gaps), run_dtype_not_best=sum(gap > 0 for gap in gaps),
        run_dtype_largest_gap=largest_gap, run_dtype_failures=beyond, tokens_after_stop=after_stop,
        sampled=sampled, proves=_proves(settings.law, sampled),
    )  # fmt: skip


def divergences(target: Any, runs: Sequence[PromptRun], settings: Settings) -> list[Divergence]:
    """Where greedy answers differ from the plain run's, and whether rounding explains it. Empty when sampling."""
    found = []
    for run in runs if settings.law.is_greedy else []:
        plain, ours = run.plain.token_ids, run.trace.token_ids
        at = first_difference(plain, ours)
        if at is not None:
            tie = tie_gap(target, run.prompt_ids, plain, ours, at, settings)
            gap = tie.gap if isfinite(tie.gap) else None
            found.append(
                Divergence(
                    id=run.prompt.id, differs_from_plain_at=at, gap=gap, bound=tie.bound,
                    numeric_tie=tie.gap <= tie.bound,
                )
            )  # fmt: skip
    return found


class Tie(NamedTuple):
    """How far two scores lie apart, and how far rounding in the model's dtype can move them."""

    gap: float
    bound: float


@torch.no_grad()
def tie_gap(target: Any, prompt_ids: list[int], plain: list[int], other: list[int], at: int, settings: Settings) -> Tie:
    """The scores of the two tokens chosen at `at`, from one plain pass; the gap is infinite past an end."""
    if at >= min(len(plain), len(other)):
        return Tie(float("inf"), 0.0)
    ids = torch.tensor([prompt_ids + plain[:at]], device=target.device)
    logits = target(input_ids=ids).logits[:, -1:]
    scores = settings.target_law(len(prompt_ids), target.device).scores(logits, ids)[0, 0]
    return Tie(float((scores[plain[at]] - scores[other[at]]).abs()), float(_rounding(scores.max(), logits.dtype)))


def _rounding(best: Tensor, dtype: torch.dtype) -> Tensor:
    return ULPS_IN_RUN_DTYPE * torch.finfo(dtype).eps * best.abs().clamp(min=1.0)


@torch.no_grad()
def _run_dtype_gaps(target: Any, runs: Sequence[PromptRun], settings: Settings) -> tuple[list[float], list[str]]:
    """How far below the best score each emitted greedy token lies, and the prompts where rounding can't explain it."""
    gaps: list[float] = []
    beyond: list[str] = []
    if not settings.law.is_greedy:
        return gaps, beyond
    for run in runs:
        emitted = torch.tensor(run.trace.token_ids, device=target.device)
        ids = torch.tensor([run.prompt_ids + run.trace.token_ids[:-1]], device=target.device)
        logits = target(input_ids=ids, logits_to_keep=len(emitted)).logits
        scores = settings.target_law(len(run.prompt_ids), target.device).scores(logits, ids)[0]
        best = scores.max(-1).values
        gap = best - scores.gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
        gaps += gap.tolist()
        if bool((gap > _rounding(best, logits.dtype)).any()):
            beyond.append(f"{run.prompt.id}: a token lies {float(gap.max()):.3f} below the best score")
    return gaps, beyond


def _tokens_after_stop(run: PromptRun, settings: Settings, tokenizer: Any) -> int:
    tokens = run.trace.token_ids
    return len(tokens) - StopWatch(settings.stops, run.prompt_ids, len(tokens), "", tokenizer).keep(tokens)


def _proves(law: Law, sampled: SampledCheck | None) -> str:
    checks = "greedy equality in float32 (caches, positions, rollback, stops)"
    if sampled is None:
        return f"{checks}; every token of the measured run is a best token up to rounding"
    told = f"{checks}; sampled answers equal plain ones under shared noise (the same while sampling, verified by match)"
    if sampled.law_p_value is not None and sampled.control_failed:
        told += f"; {sampled.law_samples} short answers follow the law at temperature {law.temperature:g}"
    return f"{told}; the law in full is proved by enumeration in the test suite, not on this run"
