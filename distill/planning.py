"""The parts of a plan: a profile measured or read, what heads leave out, and pilots where they are asked for."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.command_line import whole_numbers
from configs.errors import UserError
from configs.files import write_json
from configs.settings import StrictSettings
from decode.laws import Law
from decode.models import Loaded, load_model
from distill.answers import DataSettings
from distill.job import read_data
from distill.job_settings import JobSettings
from distill.pilots import law_of, pilot, promised
from distill.plan import Plan, make_plan
from distill.profiling import measure_profile, usual_shapes
from distill.rows import Row, split_held_out
from distill.shape import DraftSettings
from distill.teacher import Teacher
from distill.vocabulary import ceilings, choose_ids, count_tokens, kept_always
from eval.profile_file import LatencyProfile, read_profile

PILOT_SHARE = 0.03
CONTEXT = 128
LONGEST = 12  # tokens verified at once, at most
HELD_OUT_ROWS = 32


class PlanSettings(StrictSettings):
    """As the verb `plan` takes them."""

    out: Path
    target: str | None
    profile: Path | None
    data: Path | None
    budget_tokens: int
    pilots: int
    batch: str | None
    context: int | None
    threads: int | None
    dtype: str | None
    device: str
    template_arguments: dict[str, Any]


def plan_for(settings: PlanSettings) -> Plan:
    """Measure or read what a plan needs, and make it. Raises UserError for what is missing."""
    if settings.profile is None and settings.target is None:
        raise UserError("a plan needs --target to measure, or --profile, what was measured before")
    if settings.data and settings.target is None:
        raise UserError("--data is the target's text: name the --target too")
    if settings.profile:
        given = [
            f"--{name}" for name in ("batch", "context", "threads", "dtype") if getattr(settings, name) is not None
        ]
        if given:
            raise UserError(f"{', '.join(given)}: no effect with --profile, which was measured already; leave it out")
        if settings.target and not settings.data:
            raise UserError("--target has no effect with --profile, but for --data; leave it out")
    if settings.pilots and not settings.data:
        raise UserError("--pilots train on the target's answers: name them with --data (`draftsmith data` makes them)")
    profile = read_profile(settings.profile) if settings.profile else None
    target = None
    if settings.target and (profile is None or settings.data):
        target = load_model(settings.target, settings.dtype or "auto", settings.device)
        target = replace(target, template_arguments=settings.template_arguments)
    if profile is None:
        assert target
        batches = whole_numbers("--batch", settings.batch or "1")
        asked = {"target": settings.target, "run_dtype": _dtype(target), "batch": batches}
        profile = measure_profile(
            target, None, usual_shapes(target), Law(0.0, vocabulary=target.vocabulary), settings.context or CONTEXT,
            batches, LONGEST - 1, settings.threads or 0, asked,
        )  # fmt: skip
        write_json(settings.out / "profile.json", profile.model_dump(mode="json"))
    if not profile.shapes:
        raise UserError(f"{settings.profile}: holds one draft's costs only; make a profile without --draft for a plan")
    if target and target.revision != profile.settings["target_revision"]:
        raise UserError(f"{settings.profile}: a profile of another target than {settings.target}")
    rows = min(profile.settings["batch"])
    if not (target and settings.data):
        return make_plan(profile, {}, {}, settings.budget_tokens, rows)
    return _with_data(settings, settings.data, profile, target)


def _with_data(settings: PlanSettings, answers: Path, profile: LatencyProfile, target: Loaded) -> Plan:
    assert settings.target
    law, batch_rows = law_of(answers), min(profile.settings["batch"])
    data = DataSettings.model_validate({"answers": answers, "template_arguments": settings.template_arguments, **law})
    rows = read_data(JobSettings(target=settings.target, output=settings.out, data=data), target)
    count = min(HELD_OUT_ROWS, max(1, len(rows) // 5))
    known, held_out = split_held_out(rows, count, data.held_out_seed)
    shapes = {shape.name: DraftSettings.model_validate(shape.draft) for shape in profile.shapes}
    limits = head_limits(target, known, held_out, shapes, data.law)
    plan = make_plan(profile, limits, {}, settings.budget_tokens, batch_rows)
    supervised = sum(row.supervised for row in known)
    tokens = int(PILOT_SHARE * settings.budget_tokens)
    if settings.pilots and tokens > supervised:
        print(f"{answers}: {supervised} tokens; pilots of {tokens} read them more than once", file=sys.stderr)
    piloted = {}
    for candidate in plan.candidates[: settings.pilots]:
        folder = settings.out / "pilots" / candidate.name.replace(", ", "-").replace(" ", "_")
        curve = pilot(
            settings.target, data, shapes[candidate.name], tokens, supervised / len(known), len(rows), folder,
            _dtype(target),
        )  # fmt: skip
        piloted[candidate.name] = promised(curve, settings.budget_tokens, candidate.ceiling)
    return make_plan(profile, limits, piloted, settings.budget_tokens, batch_rows) if piloted else plan


def _dtype(target: Loaded) -> str:
    return str(target.model.dtype).removeprefix("torch.")


def head_limits(
    target: Loaded, known: list[Row], held_out: list[Row], shapes: dict[str, DraftSettings], law: Law
) -> dict[str, float]:
    """The largest α that the head of each shape allows on held-out text; 1 for a whole head."""
    counts = count_tokens(known, target.model.config.vocab_size)
    always, tokens = kept_always(target, counts), len(target.tokenizer)
    sizes = sorted({shape.vocabulary for shape in shapes.values() if shape.vocabulary})
    cuts = [choose_ids(counts, size, always, tokens) for size in sizes]
    found = ceilings(Teacher(target.model), held_out, cuts, torch.device(target.model.device), law)
    allowed = {cut.size: cut.alpha_greedy if law.is_greedy else cut.alpha_sampled for cut in found}
    return {name: allowed[shape.vocabulary] if shape.vocabulary else 1.0 for name, shape in shapes.items()}
