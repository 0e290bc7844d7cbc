"""The whole job: target, answers, draft, training, and the folder it all ends in."""

import json
import os
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.files import recover, sha256, write_json
from configs.provenance import provenance
from configs.reader import write_config
from decode.drafts.head import head_ids
from decode.drafts.kinds import draft_revision, load_draft
from decode.length import read_costs
from decode.models import Loaded, load_model
from distill.answers import with_template
from distill.batches import Schedule, pack
from distill.build import save_draft
from distill.calibration import fit_temperatures, store_temperatures
from distill.claims import check_answers, check_inputs, check_output, made_by, target_identity
from distill.job_settings import JobSettings
from distill.logit_cache import LogitCache
from distill.measuring import AcceptanceHook
from distill.memory import memory_advice
from distill.objectives import objective
from distill.on_policy import OnPolicy
from distill.rows import Reading, Row, read_rows, split_held_out
from distill.shape import chosen_taps, make_draft, make_drafter, make_student
from distill.step import DistillStep
from distill.students import save_memory
from distill.supply import Supply, micro_batches_per_step
from distill.teacher import Teacher, check_packing, check_plain_head
from eval.stats import FEWEST_PROMPTS
from train.checkpoint import Progress, check_processes, remove_checkpoints
from train.loop import train
from train.parallel import gather_weights, launch_name, shards_weights, start_accelerator
from train.publish.hub import check_push, push
from train.tracking import check_tracker, end_tracker, start_tracker

MEASURED_ROWS = 24  # where none are held out
CALIBRATION_ROWS = 64  # training rows that the draft's temperatures are fitted on


def run(settings: JobSettings) -> Path:
    """Distil the draft that `settings` describe and return its folder.

    A finished run is returned as it is; a killed one goes on from its last checkpoint. Raises UserError for bad
    data, for an output folder that holds another run, where memory runs out, and when a push that was asked for is
    refused: before training, for all that can be known then.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_output(settings.output, settings)
    check_processes(settings.output / "checkpoints", processes)
    check_tracker(settings.train.tracker)
    if settings.teacher == "sharded" and processes == 1:
        raise UserError("teacher=sharded has no effect on one process; launch several or leave it out")
    pushes = settings.push_to is not None and os.environ.get("RANK", "0") == "0"
    if pushes:
        check_push(settings.output / "draft", str(settings.push_to), private=settings.push_private)
    with memory_advice(settings, processes):
        draft_folder = _run(settings)
    if pushes:
        _say(push(draft_folder, str(settings.push_to), private=settings.push_private))
    return draft_folder


def _run(settings: JobSettings) -> Path:
    micro_batches = micro_batches_per_step(settings.train)
    draft_folder, done = settings.output / "draft", settings.output / "done.json"
    target = with_template(load_model(settings.target, settings.teacher_dtype, device="cpu"), settings.data)
    every_row = read_data(settings, target)
    rows, held_out = split_held_out(every_row, settings.data.held_out_rows, settings.data.held_out_seed)
    if not held_out:
        held_out = rows[:MEASURED_ROWS]
        _say("data.held_out_rows=0: acceptance is measured on rows that the draft is trained on, which flatters it")
    if settings.train.patience and len(held_out) < FEWEST_PROMPTS:
        raise UserError(
            f"train.patience needs {FEWEST_PROMPTS} held-out rows for an interval, and there are {len(held_out)}; "
            "raise data.held_out_rows"
        )
    costs = read_costs(settings.latency_profile) if settings.latency_profile else None
    inputs = {"answers_sha256": sha256(settings.data.answers)} | target_identity(target)
    del inputs["name"]
    if settings.draft.init not in ("target", "scratch"):
        inputs["init_revision"] = draft_revision(settings.draft.init)
    if settings.latency_profile:
        inputs["latency_profile_sha256"] = sha256(settings.latency_profile)
    check_inputs(settings.output, inputs)
    if done.is_file():
        remove_checkpoints(settings.output / "checkpoints")
        print(f"{draft_folder}: this run is finished already", file=sys.stderr)
        return draft_folder
    draft, sequences = make_draft(settings.draft, target, rows, settings.seed), _sequences(settings, target, rows)
    cache = _cache(settings, target, every_row)
    accelerator = _start(settings, micro_batches, inputs)

    teacher = Teacher(target.model)
    if settings.teacher == "sharded":
        teacher.shard(accelerator)  # before it moves: whole it may not fit there
    target.model.to(accelerator.device)
    draft = draft.to(accelerator.device)
    whole = deepcopy(draft) if shards_weights(accelerator) else draft
    student, drafter = make_student(settings.draft, draft), make_drafter(settings.draft, whole, target)
    if settings.train.activation_checkpointing:
        save_memory(student)
    loss_of = objective(settings.objective.name, settings.objective.beta, settings.objective.eta)
    step = DistillStep(student, loss_of, settings.objective.step_decay, settings.chunk_tokens, head_ids(draft))
    law, gamma = replace(settings.data.law, vocabulary=target.vocabulary), settings.measure_num_draft_tokens

    def refresh() -> None:
        """What drafts is what trains, or a whole copy of it where its weights are shared out."""
        if whole is not draft:
            gather_weights(draft, whole)

    supply = Supply(
        sequences, Schedule(len(sequences), settings.train.batch_rows, settings.seed), teacher,
        settings.train.micro_rows, accelerator, head_ids(draft), drafter.taps, cache,
        OnPolicy(settings.on_policy, drafter, target.model, law, target.eos_ids, settings.seed, refresh, teacher.finish)
        if settings.on_policy.fraction
        else None,
    )  # fmt: skip
    hook = AcceptanceHook(
        drafter, teacher, held_out, law, gamma, target.eos_ids, accelerator, target.tokenizer, costs, refresh
    )
    record = {
        "rows": len(rows),
        "sequences": len(sequences),
        "held_out_rows": len(held_out) if settings.data.held_out_rows else 0,
        "data_sha256": inputs["answers_sha256"],
        "answers": made_by(settings.data.answers),
        "launch": launch_name(accelerator),
        "threads": torch.get_num_threads(),
    }

    def keep_best(progress: Progress, values: Mapping[str, float]) -> None:
        if progress.step == 0:
            write_json(settings.output / "before.json", dict(values))
            save_draft(whole, target, settings.draft.kind, {}, settings.output / "untrained")
        training = record | _training_record(settings, target, progress, values)
        save_draft(whole, target, settings.draft.kind, training, draft_folder)

    progress = train(
        accelerator, step, step.figures, supply, settings.train, settings.output, hook, keep_best, step.learn
    )
    if accelerator.is_main_process:
        sampled = [row for row in rows if not (row.greedy or law.is_greedy)][:CALIBRATION_ROWS]
        if sampled:
            best = load_draft(target, str(draft_folder), settings.teacher_dtype, str(accelerator.device))
            store_temperatures(fit_temperatures(best, teacher, sampled, law, accelerator.device), draft_folder)
        ended = {"best_step": progress.best_step, hook.score: progress.best_score, "tokens": progress.tokens}
        write_json(done, ended | {"steps": progress.step, "skipped_steps": progress.skipped})
        remove_checkpoints(settings.output / "checkpoints")
    teacher.finish()
    end_tracker(accelerator)
    return draft_folder


def _sequences(settings: JobSettings, target: Loaded, rows: list[Row]) -> list[list[Row]]:
    """Rows as the draft reads them, one or several to a sequence; a target that cannot be taught so is refused."""
    some_ids = torch.tensor([rows[0].ids])
    check_plain_head(target.model, some_ids, target.name)
    if not settings.data.pack:
        return [[row] for row in rows]
    check_packing(target.model, some_ids, target.name)
    return pack(rows, settings.data.max_tokens)


def _cache(settings: JobSettings, target: Loaded, every_row: list[Row]) -> LogitCache | None:
    folder, taps = settings.cache.folder, chosen_taps(settings.draft, target.model.config)
    if folder and taps and settings.cache.taps != taps:
        raise UserError(
            f"{folder}: a draft of kind {settings.draft.kind} reads hidden states {list(taps)}, and cache.taps is "
            f"{list(settings.cache.taps)}; set cache.taps={str(list(taps)).replace(' ', '')} for `data cache` too"
        )
    return LogitCache(folder, every_row, cache_identity(settings, target)) if folder else None


def cache_identity(settings: JobSettings, target: Loaded) -> dict[str, Any]:
    """What a cache of the teacher's log-probabilities is of: all that decides its numbers and their order."""
    reading = settings.data.model_dump(
        mode="json", include={"max_tokens", "mask", "text", "drop", "overflow", "on_bad_row"}
    )
    return {
        "target": target_identity(target) | {"name": None},  # the same weights under another path are the same
        "data_sha256": sha256(settings.data.answers),
        "reading": reading,
        "teacher_dtype": settings.teacher_dtype,
        "top_k": settings.cache.top_k,
        "taps": list(settings.cache.taps),
        "shard_tokens": settings.cache.shard_tokens,
    }


def read_data(settings: JobSettings, target: Loaded) -> list[Row]:
    """The rows of the settings' answers, with what was skipped or dropped told on stderr. Raises UserError."""
    check_answers(settings.data.answers, target, settings.data.law)
    max_tokens = min(settings.data.max_tokens, target.context_tokens)
    data = settings.data
    if data.text and target.model.config.is_encoder_decoder:
        raise UserError("data.text: plain text is no source and no answer; an encoder–decoder target needs prompts")
    reading = Reading(
        max_tokens, data.mask == "last", data.template_arguments, data.text, data.drop, data.overflow == "drop"
    )
    bad = BadRows(data.on_bad_row)
    rows = read_rows(data.answers, target.tokenizer, reading, bad)
    supervised, tokens = sum(row.supervised for row in rows), sum(len(row.ids) for row in rows)
    for line in bad.lines():
        _say(f"{data.answers}: {line}")
    which = "the last answer of a chat" if reading.last_only else "every answer"
    _say(f"{len(rows)} rows, {supervised} of {tokens} tokens supervised ({which})")
    return rows


def _say(line: str) -> None:
    """On stderr, by one process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _start(settings: JobSettings, micro_batches: int, inputs: dict[str, str]) -> Any:
    tracker = None if settings.train.tracker == "none" else settings.train.tracker
    accelerator = start_accelerator(
        micro_batches, settings.train.optim.clip_norm, settings.seed, settings.train.mixed_precision, tracker,
        settings.output / "tracker",
    )  # fmt: skip
    if accelerator.is_main_process:
        settings.output.mkdir(parents=True, exist_ok=True)
        write_json(settings.output / "inputs.json", inputs)
        write_config(settings, settings.output / "config.yaml")
        recover(settings.output / "draft")
    if tracker:
        start_tracker(accelerator, tracker, settings.output / "tracker", settings.model_dump(mode="json"))
    return accelerator


def _training_record(
    settings: JobSettings, target: Loaded, progress: Progress, values: Mapping[str, float]
) -> dict[str, Any]:
    """training.json: how the weights beside it came to be, and what the hook measured before and after."""
    before = json.loads((settings.output / "before.json").read_text(encoding="utf-8"))
    return {
        "config": settings.model_dump(mode="json"),
        "target": {"name": target.name, "revision": target.revision},
        "step": progress.step,
        "supervised_tokens_seen": progress.tokens,
        "measured": {
            "num_draft_tokens": settings.measure_num_draft_tokens,
            "temperature": settings.data.temperature,
            "greedy_too": settings.data.greedy_too,
            "alpha_before": before["alpha"],
            "alpha_after": values["alpha"],
            "tau_before": before["tau"],
            "tau_after": values["tau"],
        },
        "made_with": provenance(),
    }
