"""Faults that users met in losses, in runs that were resumed and in memory: small inputs with the right behaviour."""

import copy
import json
import subprocess
import sys
from itertools import chain

import pytest
import torch
from conftest import CASES
from jobs import ROOT, environment
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from configs.errors import UserError
from configs.reader import read_config
from distill.batches import Schedule, collate
from distill.job import run
from distill.job_settings import JobSettings
from distill.objectives import forward_kl, jensen_shannon, objective, reverse_kl, total_variation
from distill.rows import Row
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher
from train.optim import OptimSettings, build_optimizer

SHARED = CASES / "_shared"
CPU = torch.device("cpu")


def oracle(case, dtype=torch.float64):
    found = json.loads((CASES / case / "oracle.json").read_text())
    student, teacher = (torch.tensor(found[f"{name}_logits"], dtype=dtype) for name in ("student", "teacher"))
    mask = torch.tensor(found.get("mask_on_logit_positions", True), dtype=torch.bool)
    return student, teacher, mask, found


def signal(teacher, batch):
    return {"hidden": teacher.hidden(batch.ids, batch.predicts), "head": teacher.head_weight}


def test_l01_the_loss_is_the_mean_over_supervised_positions_whatever_the_length():
    student, teacher, mask, case = oracle("L01")
    for times in (1, 2):
        q, p, keep = (tensor.repeat(1, times, *[1] * (tensor.ndim - 2)) for tensor in (student, teacher, mask))
        value = forward_kl(p[keep], q[keep]).mean().item()
        assert value == pytest.approx(case["forward_kl_mean_over_masked_positions"], abs=1e-6)
        assert all(value != pytest.approx(wrong, abs=1e-3) for wrong in case["wrong_values"].values())


def test_l03_every_divergence_has_the_direction_that_its_documentation_states():
    student, teacher, mask, case = oracle("L03")
    p, q = teacher[mask], student[mask]
    assert forward_kl(p, q).mean().item() == pytest.approx(case["forward_teacher_to_student"], abs=1e-6)
    assert reverse_kl(p, q).mean().item() == pytest.approx(case["reverse_student_to_teacher"], abs=1e-6)
    for beta in (0.1, 0.5, 0.9):
        # Ours is divided by β (1 - β), so that its scale does not depend on β.
        found = jensen_shannon(p, q, beta).mean().item() * beta * (1 - beta)
        assert found == pytest.approx(case[f"jsd_beta_{beta}"], abs=1e-6)
    overlap = total_variation(p.log_softmax(-1), q.log_softmax(-1)).mean().item()
    assert overlap == pytest.approx(case["total_variation"], abs=1e-6)


def test_l06_the_same_model_has_loss_zero_and_another_the_exact_one_at_every_position():
    case = json.loads((CASES / "L06" / "scenario.json").read_text())
    target, draft = (AutoModelForCausalLM.from_pretrained(SHARED / f"markov_{name}") for name in ("target", "draft"))
    batch = collate([[Row(case["input_ids"], [True] * len(case["input_ids"]))]], CPU)
    teacher = Teacher(target)
    for model, expected in ((copy.deepcopy(target), 0.0), (draft, case["mean_over_positions_0_to_5"])):
        step = DistillStep(LMStudent(model), objective("forward_kl"))
        total, _ = step(signal(teacher, batch), ids=batch.ids, predicts=batch.predicts)
        assert total.item() / 6 == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_l07_a_small_divergence_is_right_and_never_negative_in_half_precision(dtype):
    """The logits are what a model in half precision gives; what is done with them is done in float32."""
    student, teacher, _, case = oracle("L07")
    exact = (jensen_shannon(teacher, student, 0.5) * 0.25).item()
    assert exact == pytest.approx(case["jsd_half_float64"], rel=1e-6)
    p, q = teacher.to(dtype), student.to(dtype)
    found = (jensen_shannon(p, q, 0.5) * 0.25).item()
    of_rounded = (jensen_shannon(p.double(), q.double(), 0.5) * 0.25).item()
    assert found >= 0
    assert found == pytest.approx(of_rounded, abs=1e-5)


@pytest.fixture
def with_dropout():
    config = AutoConfig.from_pretrained(CASES / "L08" / "teacher_config.json")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_l08_the_teacher_is_frozen_and_in_evaluation_mode_and_the_student_keeps_its_dropout(with_dropout):
    """Both are the same model to begin with."""
    student = copy.deepcopy(with_dropout)
    teacher, step = Teacher(with_dropout), DistillStep(LMStudent(student), objective("forward_kl"))
    optimizer = build_optimizer(step, OptimSettings())
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(student.parameters())
    before = copy.deepcopy(with_dropout.state_dict())
    row = Row(list(range(4, 24)), [True] * 20)
    batch = collate([[row]], CPU)
    assert torch.equal(signal(teacher, batch)["hidden"], signal(teacher, batch)["hidden"])
    step.train()
    losses = [step(signal(teacher, batch), ids=batch.ids, predicts=batch.predicts)[0] for _ in range(2)]
    assert losses[0] != losses[1]  # its own dropout is on
    for _ in range(5):
        step(signal(teacher, batch), ids=batch.ids, predicts=batch.predicts)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(weight.grad is None for weight in with_dropout.parameters())
    assert all(torch.equal(value, before[name]) for name, value in with_dropout.state_dict().items())
    assert not with_dropout.training
    assert student.training


@pytest.mark.parametrize("processes", [1, 2])
def test_r01_a_resumed_run_sees_the_rows_that_an_unbroken_one_sees(processes):
    """12 rows by 2: each epoch has every row once, in an order of its own, whatever step a run starts from."""
    schedule = Schedule(12, 2, seed=3)
    whole = [schedule.rows_of(step) for step in range(18)]
    epochs = [[*chain(*whole[i : i + 6])] for i in (0, 6, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = Schedule(12, 2, seed=3)  # another process, after the stop
    assert [again.rows_of(step) for step in range(8, 18)] == whole[8:]
    shares = [[again.share_of(step, i, processes) for i in range(processes)] for step in range(18)]
    assert [sorted(chain(*share)) for share in shares] == [sorted(rows) for rows in whole]


def test_r03_another_number_of_processes_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """Neither the target nor the answers exist."""
    folder = tmp_path / "checkpoints" / "step-000004"
    folder.mkdir(parents=True)
    (folder / "sizes.json").write_text("{}")
    (folder / "progress.json").write_text(json.dumps({"step": 4, "processes": 2}))
    for processes in ("1", "3"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        words = rf"saved by 2 processes and cannot be resumed by {processes}; launch with --num_processes 2"
        with pytest.raises(UserError, match=words):
            run(read_config(JobSettings, None, ["target=nowhere", f"output={tmp_path}"]))


def test_a_model_that_names_its_layers_otherwise_trains(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=60, n_positions=64)
    teacher, step = (
        Teacher(GPT2LMHeadModel(config)),
        DistillStep(LMStudent(GPT2LMHeadModel(config)), objective("forward_kl")),
    )
    batch = collate([[Row(list(range(3, 23)), [True] * 20)]], CPU)
    loss, _ = step(signal(teacher, batch), ids=batch.ids, predicts=batch.predicts)
    assert loss.item() > 0


MEASURE = """
import copy, json, sys
from pathlib import Path
import torch
from decode.models import load_model
from distill.batches import collate
from distill.build import build_lm_draft
from distill.objectives import objective
from distill.rows import Row
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10

target = load_model(sys.argv[1], "float32", device="cpu")
draft = build_lm_draft(target.model, (0, 10, 20, -1)).requires_grad_()
ids = torch.randint(5, 40000, (2, 257), generator=torch.Generator().manual_seed(0))
batch = collate([[Row(row, [True] * len(row))] for row in ids.tolist()], torch.device("cpu"))
teacher, found = Teacher(target.model), []
for chunk in (128, 512):
    step = DistillStep(LMStudent(draft), objective("forward_kl"), chunk_tokens=chunk)
    for weight in draft.parameters():
        weight.grad = torch.zeros_like(weight)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    hidden = teacher.hidden(batch.ids, batch.predicts)
    assert not hidden.requires_grad
    loss = step({"hidden": hidden, "head": teacher.head_weight}, ids=batch.ids, predicts=batch.predicts)[0]
    loss.backward()
    mib = resident("VmHWM") - before
    grads = [float(weight.grad.norm()) for weight in draft.parameters()]
    found.append({"mib": mib, "loss": loss.item(), "tokens": int(batch.predicts.sum()), "grads": grads})
print(json.dumps(found))
"""


@pytest.mark.smollm2
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_g01_a_step_on_smollm2_never_holds_the_logits_of_all_its_tokens(smollm2):
    """512 tokens of 49,152 ids are 96 MiB in float32; a dense step keeps several such tensors of both models.

    The bound: activations of four layers and of the teacher's one at a time, a copy of the head's gradient (108 MiB),
    and chunks of 128 tokens, 24 MiB each. Blocks over 1 MiB go back to the system at once, so that the peak is what
    is held and not what the allocator keeps for later.
    """
    alone = environment() | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-c", MEASURE, str(smollm2)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone, timeout=300)
    assert done.returncode == 0, done.stderr
    chunked, dense = json.loads(done.stdout.splitlines()[-1])
    assert chunked["tokens"] == 512
    assert chunked["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert chunked["grads"] == pytest.approx(dense["grads"], rel=1e-4)
    assert chunked["mib"] < 650
    assert dense["mib"] > chunked["mib"] + 4 * 96


def test_p01_a_student_and_a_frozen_teacher_stand_side_by_side_and_only_one_is_prepared():
    """The step that accelerate prepares holds the student's parameters and none of the teacher's."""
    target, draft = (AutoModelForCausalLM.from_pretrained(SHARED / name) for name in ("target_ctx", "draft_ctx"))
    teacher, step = Teacher(target), DistillStep(LMStudent(draft), objective("forward_kl"))
    assert set(step.parameters()) == set(draft.parameters())
    assert not set(step.parameters()) & set(target.parameters())
    assert isinstance(step, nn.Module)
    assert not isinstance(teacher, nn.Module)
