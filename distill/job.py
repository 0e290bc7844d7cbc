"""The whole job: target, answers, draft, training, and the folder it all ends in."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from configs.files import recover, sha256, write_json
from configs.provenance import provenance
from configs.reader import write_config
from configs.settings import StrictSettings
from decode.models import Loaded, load_model
from distill.answers import DataSettings
from distill.batches import Schedule
from distill.build import DraftSettings, build_lm_draft, save_draft
from distill.claims import check_answers, check_inputs, check_output
from distill.measuring import acceptance_hook
from distill.objectives import forward_kl
from distill.rows import Row, read_rows, split_held_out
from distill.step import DistillStep
from distill.supply import Supply, micro_batches_per_step
from distill.teacher import Teacher, check_plain_head
from train.checkpoint import Progress, remove_checkpoints
from train.loop import TrainSettings, train
from train.parallel import launch_name, start_accelerator
from train.tracking import check_tracker, start_wandb

OBJECTIVES = {"forward_kl": forward_kl}


class JobSettings(StrictSettings):
    """Everything that decides a distillation run."""

    target: str = Field(description="Target: a folder, a Hub id[@revision] or a GGUF file.")
    output: Path = Field(Path("runs/distill"), description="Folder of the run; the draft ends in OUTPUT/draft.")
    seed: int = Field(0, ge=0, description="Of the row order, the held-out split and the sampled answers.")
    objective: Literal["forward_kl"] = Field("forward_kl", description="KL(p ‖ q) against the target's logits.")
    chunk_tokens: int = Field(128, ge=1, description="Supervised positions whose logits exist at a time.")
    teacher_dtype: str = Field("float32", description="Dtype the target teaches in; fastest on CPU is float32.")
    measure_num_draft_tokens: int = Field(3, ge=1, description="γ of the in-training acceptance measurement.")
    data: DataSettings = DataSettings()
    draft: DraftSettings = DraftSettings()
    train: TrainSettings = TrainSettings()


def run(settings: JobSettings) -> Path:
    """Distil the draft that `settings` describe and return its folder.

    A finished run is returned as it is; a killed one goes on from its last checkpoint. Raises UserError for bad
    data and for an output folder that holds another run.
    """
    check_output(settings.output, settings)
    check_tracker(settings.train.tracker)
    micro_batches = micro_batches_per_step(settings.train)
    draft_folder, done = settings.output / "draft", settings.output / "done.json"
    target = load_model(settings.target, settings.teacher_dtype, device="cpu")
    rows, held_out = _data(settings, target)
    inputs = {"answers_sha256": sha256(settings.data.answers), "target_revision": target.revision}
    check_inputs(settings.output, inputs)
    if done.is_file():
        remove_checkpoints(settings.output / "checkpoints")
        print(f"{draft_folder}: this run is finished already", file=sys.stderr)
        return draft_folder
    draft = build_lm_draft(target.model, settings.draft.layers)
    check_plain_head(target.model, torch.tensor([rows[0].ids]), target.name)
    accelerator = _start(settings, micro_batches, inputs)

    teacher = Teacher(target.model.to(accelerator.device))
    step = DistillStep(draft.to(accelerator.device), OBJECTIVES[settings.objective], settings.chunk_tokens)
    schedule = Schedule(len(rows), settings.train.batch_rows, settings.seed)
    supply = Supply(rows, schedule, teacher, settings.train.micro_rows, accelerator)
    gamma = settings.measure_num_draft_tokens
    law = replace(settings.data.law, vocabulary=target.vocabulary)
    measure = acceptance_hook(draft, teacher, held_out, law, gamma, target.eos_ids, accelerator)
    record = {
        "rows": len(rows),
        "held_out_rows": len(held_out),
        "data_sha256": inputs["answers_sha256"],
        "launch": launch_name(accelerator),
    }

    def keep_best(progress: Progress, values: Mapping[str, float]) -> None:
        if progress.step == 0:
            write_json(settings.output / "before.json", dict(values))
            save_draft(draft, target, settings.draft.kind, {}, settings.output / "untrained")
        training = record | _training_record(settings, target, progress, values)
        save_draft(draft, target, settings.draft.kind, training, draft_folder)

    progress = train(accelerator, step, supply, settings.train, settings.output, measure, "tau", keep_best)
    if accelerator.is_main_process:
        write_json(done, {"best_step": progress.best_step, "tau": progress.best_score, "tokens": progress.tokens})
        remove_checkpoints(settings.output / "checkpoints")
    accelerator.end_training()
    return draft_folder


def _data(settings: JobSettings, target: Loaded) -> tuple[list[Row], list[Row]]:
    check_answers(settings.data.answers, target, settings.data.law)
    max_tokens = min(settings.data.max_tokens, target.context_tokens)
    rows = read_rows(settings.data.answers, target.tokenizer, max_tokens)
    return split_held_out(rows, settings.data.held_out_rows, settings.seed)


def _start(settings: JobSettings, micro_batches: int, inputs: dict[str, str]) -> Any:
    tracker = None if settings.train.tracker == "none" else settings.train.tracker
    accelerator = start_accelerator(micro_batches, settings.train.optim.clip_norm, settings.seed, tracker)
    if accelerator.is_main_process:
        settings.output.mkdir(parents=True, exist_ok=True)
        write_json(settings.output / "inputs.json", inputs)
        write_config(settings, settings.output / "config.yaml")
        recover(settings.output / "draft")
    if tracker:
        start_wandb(accelerator, settings.model_dump(mode="json"))
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
            "alpha_before": before["alpha"],
            "alpha_after": values["alpha"],
            "tau_before": before["tau"],
            "tau_after": values["tau"],
        },
        "made_with": provenance(),
    }
