"""The whole job on tiny models, in processes of its own, launched as people launch it."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from jobs import BIN, LAUNCHES, ROOT, environment, losses, metrics, run, run_decode
from transformers import AutoModelForCausalLM

from decode.models import load_model


@pytest.fixture(scope="session")
def finished(job, tmp_path_factory) -> Path:
    """A run of one process from start to end."""
    output = tmp_path_factory.mktemp("runs") / "one"
    done = run(job(output))
    assert done.returncode == 0, done.stderr
    return output


def test_a_run_lowers_the_loss_and_keeps_the_draft_with_the_best_held_out_tau(finished):
    found = losses(finished)
    assert len(found) == 8
    assert found[-1] < 0.9 * found[0]
    taus = {row["step"]: row["held_out/tau"] for row in metrics(finished) if "held_out/tau" in row}
    assert sorted(taus) == [0, 4, 8]
    training = json.loads((finished / "draft" / "training.json").read_text())
    assert training["step"] == max(taus, key=lambda step: taus[step])
    assert training["measured"]["tau_before"] == taus[0]
    assert training["measured"]["tau_after"] == max(taus.values())
    assert training["launch"] == "NO x 1"
    assert not (finished / "checkpoints").exists()


def test_the_draft_folder_loads_and_the_untrained_one_lies_beside_it(finished):
    trained, untrained = (AutoModelForCausalLM.from_pretrained(finished / name) for name in ("draft", "untrained"))
    assert trained.config.num_hidden_layers == untrained.config.num_hidden_layers == 1
    assert not torch.equal(trained.model.embed_tokens.weight, untrained.model.embed_tokens.weight)


@pytest.mark.parametrize("launch", ["2 x DDP", "2 x ZeRO-2"])
def test_two_processes_give_the_loss_curve_of_one(finished, job, tmp_path, launch):
    """Same global rows per step, float32: every loss within 1e-4 of the single process's, relative."""
    output = tmp_path / "two"
    done = run(job(output), launch)
    assert done.returncode == 0, done.stderr
    assert losses(output) == pytest.approx(losses(finished), rel=1e-4)
    named = {"2 x DDP": "MULTI_CPU x 2", "2 x ZeRO-2": "DEEPSPEED zero-2 x 2"}[launch]
    assert json.loads((output / "draft" / "training.json").read_text())["launch"] == named
    held_out = [
        [row["held_out/alpha"] for row in metrics(path) if "held_out/alpha" in row] for path in (output, finished)
    ]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-3)


def test_one_pass_per_step_gives_the_loss_curve_of_four_micro_batches(finished, job, tmp_path):
    output = tmp_path / "whole"
    assert run(job(output, "train.micro_rows=8")).returncode == 0
    assert losses(output) == pytest.approx(losses(finished), rel=1e-4)


@pytest.mark.parametrize("launch", ["1 process", "2 x ZeRO-2"])
def test_a_killed_run_goes_on_from_its_last_checkpoint_and_ends_the_same(finished, job, tmp_path, launch):
    output = tmp_path / "killed"
    command = [*LAUNCHES[launch], *job(output)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment(launch), **quiet):
        until = time.time() + 240
        while not list((output / "checkpoints").glob("step-??????")) and time.time() < until:
            time.sleep(0.01)
        subprocess.run(["pkill", "-KILL", "-f", str(output)], check=True)  # the launcher and its workers
    assert not (output / "done.json").exists()
    done = run(job(output), launch)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    assert losses(output) == pytest.approx(losses(finished), rel=1e-6 if launch == "1 process" else 1e-4)
    ours, theirs = ((path / "draft" / "model.safetensors").read_bytes() for path in (output, finished))
    assert ours == theirs or launch != "1 process"


def test_a_finished_run_is_not_trained_again(finished, job):
    before = (finished / "draft" / "model.safetensors").stat().st_mtime_ns
    done = run(job(finished))
    assert done.returncode == 0
    assert "finished already" in done.stderr
    assert (finished / "draft" / "model.safetensors").stat().st_mtime_ns == before


def test_another_run_in_the_same_folder_is_refused_with_what_differs(finished, job):
    done = run(job(finished, "train.steps=9"))
    assert done.returncode == 2
    assert "holds another run (different: train.steps)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_whose_answers_changed_since_it_began_is_refused(finished, job, answers, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    changed = tmp_path / "answers.jsonl"
    changed.write_text("".join(answers.read_text().splitlines(keepends=True)[:-1]))
    shutil.copy(answers.with_suffix(".provenance.json"), changed.with_suffix(".provenance.json"))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(answers), str(changed)))
    done = run(job(tmp_path / "run", f"data.answers={changed}"))
    assert done.returncode == 2
    assert "began with other inputs (changed: answers_sha256)" in done.stderr


def test_a_run_whose_template_changed_since_it_began_is_refused(finished, job, answers, tiny_target, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(tiny_target, tmp_path / "target")
    imported = tmp_path / "imported.jsonl"  # without provenance: nothing says which template it was written with
    shutil.copy(answers, imported)
    config = tmp_path / "run" / "config.yaml"
    same = [f"data.answers={imported}", f"target={tmp_path / 'target'}"]
    config.write_text(
        config.read_text().replace(str(answers), str(imported)).replace(str(tiny_target), str(tmp_path / "target"))
    )
    assert "finished already" in run(job(tmp_path / "run", *same)).stderr
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    done = run(job(tmp_path / "run", *same))
    assert done.returncode == 2
    assert "began with other inputs (changed: chat_template_hash)" in done.stderr


def test_bad_data_stops_with_one_line_and_exit_code_2_and_writes_nothing(job, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    done = run(job(tmp_path / "run", f"data.answers={bad}"))
    assert done.returncode == 2
    assert f"error: {bad}:1: no assistant turn" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_deepspeed_launch_that_would_fall_back_to_ddp_is_refused(job, tmp_path):
    command = [*LAUNCHES["2 x ZeRO-2"], *job(tmp_path / "run")]
    forced = environment() | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=forced, timeout=300)
    assert done.returncode != 0
    assert "fell back to MULTI_CPU: unset ACCELERATE_USE_CPU" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_literal_accelerate_launch_distill_works_from_the_checkout(finished, job):
    command = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "distill", *job(finished)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "finished already" in done.stderr


def test_wandb_works_offline_without_a_key(job, tmp_path):
    output = tmp_path / "run"
    clean = {k: v for k, v in environment().items() if not k.startswith("WANDB_")} | {"WANDB_DIR": str(tmp_path)}
    command = [*LAUNCHES["1 process"], *job(output, "train.tracker=wandb", "train.steps=2")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "kept offline" in done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_a_trimmed_head_and_packed_rows_train_and_the_draft_decodes(job, tmp_path, tiny_target):
    output = tmp_path / "small"
    done = run(job(output, "draft.vocabulary=64", "data.pack=true", "data.max_tokens=240"))
    assert done.returncode == 0, done.stderr
    assert "tokens supervised (every answer)" in done.stderr
    assert losses(output)[-1] < losses(output)[0]
    record = json.loads((output / "draft" / "training.json").read_text())
    assert record["sequences"] < record["rows"]
    draft = load_model(str(output / "draft"))
    assert draft.model.lm_head.weight.shape[0] == 64
    answered = run_decode(tiny_target, output / "draft")
    assert answered["token_ids"] == run_decode(tiny_target)["token_ids"]


@pytest.mark.parametrize("launch", ["1 process", "2 x DDP"])
def test_rolled_out_rows_train_on_any_number_of_processes(job, tmp_path, launch):
    output = tmp_path / "rolled"
    more = ["on_policy.fraction=0.5", "on_policy.by=pair", "on_policy.error_weight=2", "on_policy.max_new_tokens=12"]
    done = run(job(output, *more), launch)
    assert done.returncode == 0, done.stderr
    assert losses(output)[-1] < losses(output)[0]


def test_a_draft_trains_from_scratch_and_from_another_draft(finished, job, tmp_path):
    small = ["draft.init=scratch", "draft.depth=1", "draft.width=16"]
    done = run(job(tmp_path / "scratch", *small, kind="lm from scratch"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "scratch")[-1] < losses(tmp_path / "scratch")[0]
    done = run(job(tmp_path / "again", f"draft.init={finished / 'draft'}", kind="lm from scratch"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "again")[0] < 0.9 * losses(finished)[0]
