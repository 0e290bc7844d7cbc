"""Further measurements of the same pair at other draft lengths and temperatures, on some of the prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import track

from configs.errors import UserError
from configs.records import append_record, whole_records
from decode.drafts.contract import Draft
from decode.drafts.kinds import looks_up, trained_part
from decode.drafts.lookup import LookupDraft, LookupOrDraft
from decode.generation import Settings
from decode.models import Loaded
from decode.trace import Tally
from eval.live import PromptRun, run_pair
from eval.report import SweepPoint
from eval.stats import Timed, speedup, speedup_interval


def at_length(settings: Settings, num_draft_tokens: int) -> Settings:
    """The same with another γ."""
    if num_draft_tokens < 1:
        raise UserError(f"sweep_lengths {num_draft_tokens}: expected 1 or more")
    return replace(settings, num_draft_tokens=num_draft_tokens)


def at_temperature(settings: Settings, temperature: float) -> Settings:
    """The same at another temperature; at 0 filters have no use."""
    law = settings.law.greedy() if temperature == 0 else replace(settings.law, temperature=temperature)
    return replace(settings, law=law)


Change = tuple[str | None, Draft[Any], Settings]  # the draft's name where it is another one


def without_training(name: str, draft: Draft[Any], target: Loaded) -> list[tuple[str, Draft[Any]]]:
    """The drafts that need no training, to stand beside `draft` of that name: what do they reach, alone and with it?"""
    lookup = LookupDraft(int(target.model.config.vocab_size))
    alone: tuple[str, Draft[Any]] = ("lookup", lookup)
    if looks_up(name):
        return [alone] if trained_part(name) else []
    return [alone, ("lookup+draft", LookupOrDraft(lookup, draft))]


def sweep(
    target: Loaded, prompts: Sequence[list[int]], changes: Sequence[Change], unfinished: Path
) -> list[SweepPoint]:  # fmt: skip
    """One point for each of `changes`; those that `unfinished` has already are read back."""
    points = [SweepPoint.model_validate(row) for row in whole_records(unfinished)]
    left = changes[len(points) :]
    for change in track(left, f"other {unfinished.stem}") if left else ():
        points.append(_point(target, prompts, change))
        append_record(unfinished, points[-1].model_dump(mode="json"))
    return points


def measured_already(name: str, runs: Sequence[PromptRun], settings: Settings) -> SweepPoint:
    """The draft's own point, from what was decoded of these prompts."""
    plain, drafted = ([getattr(run, arm).decode for run in runs] for arm in ("plain", "speculative"))
    gamma = settings.num_draft_tokens
    return SweepPoint(
        draft=Path(name).name if Path(name).is_dir() else name,
        num_draft_tokens=gamma if isinstance(gamma, int) else None,
        temperature=settings.law.temperature,
        prompts=len(runs),
        tau=Tally.of([done for run in runs for done in run.trace.rounds]).tau,
        speedup_decode=speedup(plain, drafted),
        speedup_decode_ci=speedup_interval(plain, drafted),
    )


def _point(target: Loaded, prompts: Sequence[list[int]], change: Change) -> SweepPoint:
    name, draft, settings = change
    runs = [run_pair(target, draft, ids, settings, plain_first=i % 2 == 0) for i, ids in enumerate(prompts)]
    plain = [arm.decode for arm, _ in runs]
    drafted = [Timed(answer.decode_s, max(0, len(answer.token_ids) - 1)) for _, answer in runs]
    gamma = settings.num_draft_tokens
    return SweepPoint(
        draft=name,
        num_draft_tokens=gamma if isinstance(gamma, int) else None,
        temperature=settings.law.temperature,
        prompts=len(prompts),
        tau=Tally.of([done for _, answer in runs for done in answer.rounds]).tau,
        speedup_decode=speedup(plain, drafted),
        speedup_decode_ci=speedup_interval(plain, drafted),
    )
