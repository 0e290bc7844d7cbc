"""The losslessness certificate in its simplest honest form: what was checked on this pair, and how it came out."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel

from decode.drafts.lm import LMDraft
from decode.generate import Settings, generate
from decode.laws import Law
from eval.live import PromptRun

NEAR_TIE_FP32 = 1e-4
ULPS_IN_RUN_DTYPE = 4  # two kernels, each off by one or two


class Certificate(BaseModel):
    """fp32_* compare greedy speculative with greedy plain decoding in float32, token by token.

    run_dtype_* put every greedy token that the measured run emitted through one plain forward: its logit may lie
    below the best one by no more than rounding explains. Sampling has no such check on a run; its law is proved
    by enumeration in the tests (tests/test_decode_enumeration.py).
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
    proves: str


def certify(
    target: Any,
    draft: LMDraft,
    runs: Sequence[PromptRun],
    settings: Settings,
    fp32_prompts: int,
    fp32_tokens: int,
) -> Certificate:
    """Check `fp32_prompts` of the runs again in float32, and all of them in the dtype they ran in."""
    exact_target, exact_draft = copy.deepcopy(target).float(), draft.with_model(copy.deepcopy(draft.model).float())
    again = replace(settings, law=Law(0.0, vocabulary=settings.law.vocabulary), max_new_tokens=fp32_tokens)
    equal = near_ties = compared = 0
    failures: list[str] = []
    for run in runs[:fp32_prompts]:
        plain = generate(exact_target, None, run.prompt_ids, again).token_ids
        drafted = generate(exact_target, exact_draft, run.prompt_ids, again).token_ids
        compared += len(plain)
        difference = first_difference(plain, drafted)
        if difference is None:
            equal += 1
        elif tie_gap(exact_target, run.prompt_ids, plain, drafted, difference) < NEAR_TIE_FP32:
            near_ties += 1
        else:
            failures.append(f"{run.prompt.id}: token {difference} differs and is no near-tie")
    gaps, beyond = _run_dtype_gaps(target, runs, settings)
    after_stop = sum(_tokens_after_stop(run.trace.token_ids, settings.stops.eos_ids) for run in runs)
    return Certificate(
        passed=not failures and not beyond and after_stop == 0,
        fp32_prompts=len(runs[:fp32_prompts]), fp32_tokens=compared, fp32_equal_prompts=equal,
        fp32_near_ties=near_ties, fp32_failures=failures, near_tie_bound=NEAR_TIE_FP32,
        run_dtype_tokens=len(gaps), run_dtype_not_best=sum(gap > 0 for gap in gaps),
        run_dtype_largest_gap=max(gaps, default=0.0), run_dtype_failures=beyond, tokens_after_stop=after_stop,
        proves=_proves(settings.law),
    )  # fmt: skip


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None when equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.no_grad()
def tie_gap(target: Any, prompt_ids: list[int], plain: list[int], other: list[int], at: int) -> float:
    """Gap between the logits of the two tokens chosen at `at`, from one plain pass; infinite past an end."""
    if at >= min(len(plain), len(other)):
        return float("inf")
    ids = torch.tensor([prompt_ids + plain[:at]], device=target.device)
    logits = target(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    return float((logits[plain[at]] - logits[other[at]]).abs())


@torch.no_grad()
def _run_dtype_gaps(target: Any, runs: Sequence[PromptRun], settings: Settings) -> tuple[list[float], list[str]]:
    """How far below the best logit each emitted greedy token lies, and the prompts where rounding can't explain it."""
    gaps: list[float] = []
    beyond: list[str] = []
    if not settings.law.is_greedy:
        return gaps, beyond
    for run in runs:
        emitted = torch.tensor(run.trace.token_ids, device=target.device)
        ids = torch.tensor([run.prompt_ids + run.trace.token_ids[:-1]], device=target.device)
        logits = target(input_ids=ids, logits_to_keep=len(emitted)).logits[0]
        best = logits.max(-1).values.float()
        gap = best - logits.gather(-1, emitted.unsqueeze(-1)).squeeze(-1).float()
        bound = ULPS_IN_RUN_DTYPE * torch.finfo(logits.dtype).eps * best.abs().clamp(min=1.0)
        gaps += gap.tolist()
        if bool((gap > bound).any()):
            beyond.append(f"{run.prompt.id}: a token lies {float(gap.max()):.3f} below the best logit")
    return gaps, beyond


def _tokens_after_stop(token_ids: Sequence[int], eos_ids: tuple[int, ...]) -> int:
    ends = [i for i, token in enumerate(token_ids) if token in eos_ids]
    return len(token_ids) - 1 - ends[0] if ends else 0


def _proves(law: Law) -> str:
    checks = "greedy equality in float32 (caches, positions, rollback, stops)"
    if law.is_greedy:
        return f"{checks}; every token of the measured run is a best token up to rounding"
    return f"{checks}; the law at temperature {law.temperature:g} is proved by the test suite, not on this run"
