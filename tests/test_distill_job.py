"""The whole job on tiny models, in processes of its own, launched as people launch it."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from jobs import LAUNCHES, ROOT, environment, losses, metrics, run, run_decode, run_here
from transformers import AutoModelForCausalLM

from configs.errors import UserError
from decode.models import load_model
from distill.step import DistillStep


@pytest.fixture(scope="session")
def finished(job, tmp_path_factory) -> Path:
    """A run of one process from start to end."""
    output = tmp_path_factory.mktemp("runs") / "one"
    run_here(job(output))
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


def test_one_pass_per_step_gives_the_loss_curve_of_four_micro_batches(finished, job, tmp_path):
    output = tmp_path / "whole"
    run_here(job(output, "train.micro_rows=8"))
    assert losses(output) == pytest.approx(losses(finished), rel=1e-4)


def test_a_killed_run_goes_on_from_its_last_checkpoint_and_ends_the_same_bit_for_bit(finished, job, tmp_path, capfd):
    output = tmp_path / "killed"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*LAUNCHES["1 process"], *job(output)], cwd=ROOT, env=environment(), **quiet) as process:
        until = time.time() + 240
        while not list((output / "checkpoints").glob("step-??????")) and time.time() < until:
            time.sleep(0.01)
        process.kill()
    assert not (output / "done.json").exists()
    run_here(job(output))
    assert "resuming after step" in capfd.readouterr().err
    assert losses(output) == losses(finished)
    ours, theirs = ((path / "draft" / "model.safetensors").read_bytes() for path in (output, finished))
    assert ours == theirs


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


def test_rolled_out_rows_train(job, tmp_path):
    output = tmp_path / "rolled"
    more = ["on_policy.fraction=0.5", "on_policy.by=pair", "on_policy.error_weight=2", "on_policy.max_new_tokens=12"]
    run_here(job(output, *more))
    assert losses(output)[-1] < losses(output)[0]


def test_a_draft_trains_from_scratch(job, tmp_path):
    run_here(job(tmp_path / "scratch", "draft.init=scratch", "draft.depth=1", "draft.width=16", kind="lm from scratch"))
    assert losses(tmp_path / "scratch")[-1] < losses(tmp_path / "scratch")[0]


def test_how_a_run_is_done_may_change_when_it_is_started_again(finished, job, capfd):
    run_here(job(finished, "train.micro_rows=4", "chunk_tokens=7", "train.activation_checkpointing=true"))
    assert "finished already" in capfd.readouterr().err


def test_more_memory_than_there_is_ends_with_what_needs_less(job, tmp_path, monkeypatch):
    """The allocator's own error, as a forward pass that is too large meets it."""
    monkeypatch.setattr(DistillStep, "forward", lambda *_, **__: torch.empty(2**50))
    with pytest.raises(UserError, match=r"out of memory .*can't allocate memory.*train.micro_rows=1.*chunk_tokens=64"):
        run_here(job(tmp_path / "run"))


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_tracker_gets_losses_acceptance_and_samples_without_account_or_network(job, tmp_path, name, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    output = tmp_path / "run"
    run_here(job(output, f"train.tracker={name}", "train.steps=4", kind="eagle3"))
    wanted = {
        "loss",
        "alpha_1",
        "alpha_3",
        "learning_rate",
        "tokens_per_s",
        "memory_gib",
        "held_out/alpha_2",
        "held_out/tau",
    }
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(output / "tracker" / "draftsmith"))
        events.Reload()
        assert wanted <= set(events.Tags()["scalars"])
        assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses(output))
        assert any("sample_" in tag for tag in events.Tags()["tensors"])
    else:
        import sqlite3

        (database,) = (tmp_path / "trackio").glob("draftsmith*.db")
        with sqlite3.connect(database) as connection:
            rows = [json.loads(row) for (row,) in connection.execute("select metrics from metrics")]
        assert wanted <= set().union(*rows)
        assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses(output))
