"""Several processes, launched as people launch them: the same losses everywhere, resuming, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import ACCELERATE, BIN, LAUNCHES, ROOT, environment, losses, metrics, run, run_here
from safetensors.torch import load_file

from configs.errors import UserError
from train.launching import launch as launch_processes

SETTINGS = {
    "lm": ["train.steps=20"],
    "eagle3": ["train.steps=20", "objective.name=hybrid", "draft.vocabulary=200", "draft.taps=[0,1,3]"],
}
SHARDED = ["teacher=sharded", "train.activation_checkpointing=true"]
NAMES = {
    "2 x DDP": "MULTI_CPU x 2", "2 x ZeRO-1": "DEEPSPEED zero-1 x 2", "2 x ZeRO-2": "DEEPSPEED zero-2 x 2",
    "2 x ZeRO-3": "DEEPSPEED zero-3 x 2", "2 x ZeRO-3, offloaded": "DEEPSPEED zero-3 x 2", "2 x FSDP2": "FSDP2 x 2",
}  # fmt: skip


@pytest.fixture(scope="session")
def alone(job, tmp_path_factory):
    """Runs of one process from start to end, by kind."""
    folder = tmp_path_factory.mktemp("alone")
    for kind, settings in SETTINGS.items():
        run_here(job(folder / kind, *settings, kind=kind))
    return folder


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("launch", "kind", "more"),
    [
        ("2 x DDP", "lm", []),
        ("2 x ZeRO-2", "eagle3", []),
        ("2 x ZeRO-3", "eagle3", SHARDED),
        ("2 x FSDP2", "lm", SHARDED),
        slow("2 x DDP", "eagle3", SHARDED),
        slow("2 x ZeRO-1", "lm", []),
        slow("2 x ZeRO-1", "eagle3", []),
        slow("2 x ZeRO-2", "lm", []),
        slow("2 x ZeRO-3", "lm", []),
        slow("2 x ZeRO-3, offloaded", "lm", []),
        slow("2 x ZeRO-3, offloaded", "eagle3", SHARDED),
        slow("2 x FSDP2", "eagle3", []),
    ],
)
def test_every_launch_gives_the_losses_of_one_process(alone, job, tmp_path, launch, kind, more):
    """The same rows per step, float32, 20 steps: losses within 1e-4, relative; so is the draft that comes out."""
    output = tmp_path / "two"
    done = run(job(output, *SETTINGS[kind], *more, kind=kind), launch)
    assert done.returncode == 0, done.stderr
    assert len(losses(output)) == 20
    assert losses(output) == pytest.approx(losses(alone / kind), rel=1e-4)
    assert json.loads((output / "draft" / "training.json").read_text())["launch"] == NAMES[launch]
    rates, held_out = (
        [[row[name] for row in metrics(path) if name in row] for path in (output, alone / kind)]
        for name in ("learning_rate", "held_out/alpha")
    )
    assert rates[0] == rates[1]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-3)
    ours, theirs = (load_file(path / "untrained" / "model.safetensors") for path in (output, alone / kind))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize(
    ("launch", "kind"),
    [("2 x DDP", "lm"), slow("2 x ZeRO-2", "lm"), slow("2 x ZeRO-3", "eagle3"), slow("2 x FSDP2", "eagle3")],
)
def test_a_run_of_several_processes_that_was_killed_ends_as_one_that_was_not(job, tmp_path, launch, kind):
    """With DDP bit for bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(job(whole, *SETTINGS[kind], kind=kind), launch).returncode == 0
    command = [*LAUNCHES[launch], *job(killed, *SETTINGS[kind], kind=kind)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment(launch), **quiet):
        until = time.time() + 240
        while not list((killed / "checkpoints").glob("step-??????")) and time.time() < until:
            time.sleep(0.01)
        subprocess.run(["pkill", "-KILL", "-f", str(killed)], check=True)  # the launcher and its workers
    assert not (killed / "done.json").exists()
    done = run(job(killed, *SETTINGS[kind], kind=kind), launch)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    if launch == "2 x DDP":
        assert losses(killed) == losses(whole)
        assert (killed / "draft/model.safetensors").read_bytes() == (whole / "draft/model.safetensors").read_bytes()
    else:
        assert losses(killed) == pytest.approx(losses(whole), rel=1e-4)


def test_p03_a_row_that_is_left_out_on_one_process_hangs_nobody(tmp_path, job, tiny_target):
    """Three of eight rows lose their answer to the limit; both processes run the same steps, through --launch."""
    rows = tmp_path / "rows.jsonl"
    shutil.copy(ROOT / "tests/cases/P03/rows.jsonl", rows)
    arguments = [item for item in job(tmp_path / "run") if not item.startswith(("data.", "train."))]
    more = [
        "data.max_tokens=48",
        "data.on_bad_row=skip",
        "data.held_out_rows=0",
        "train.steps=5",
        "train.batch_rows=2",
        "train.measure_every=5",
    ]
    command = [str(BIN / "draftsmith"), "distill", "--launch", "ddp", "--num-processes", "2", *arguments,
               f"data.answers={rows}", *more]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\n5 rows, " in done.stderr
    assert done.stderr.count("acceptance is measured on rows that the draft is trained on") == 1
    assert len(losses(tmp_path / "run")) == 5
    assert json.loads((tmp_path / "run/draft/training.json").read_text())["launch"] == "MULTI_CPU x 2"


def test_sigterm_to_our_own_launcher_saves_and_exits_with_143(job, tmp_path):
    output = tmp_path / "run"
    more = ["train.steps=4000", "train.save_every=4000", "train.measure_every=4000"]
    command = [str(BIN / "draftsmith"), "distill", *job(output), *more, "--launch", "ddp", "--num-processes", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        until = time.time() + 120
        while not (output / "metrics.jsonl").is_file() or len(metrics(output)) < 5:
            assert time.time() < until
            time.sleep(0.05)
        process.terminate()
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 143, said
    assert "asked to stop: saved after step" in said
    (checkpoint,) = (output / "checkpoints").iterdir()
    assert json.loads((checkpoint / "progress.json").read_text())["processes"] == 2


def test_a_mistake_under_our_own_launcher_is_one_line_and_exit_code_2(job, tmp_path):
    command = [str(BIN / "draftsmith"), "distill", *job(tmp_path / "run", "train.batch_rows=7"), "--launch=zero3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 2
    assert "error: train.batch_rows is 7, which 2 processes cannot share equally" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_launcher_inside_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    with pytest.raises(UserError, match=r"--launch starts accelerate itself; leave it out under"):
        launch_processes("ddp", 2, "distill", [])


@pytest.mark.parametrize(
    ("command", "environ", "words"),
    [
        (
            [*ACCELERATE, "zero2.yaml"],
            {"ACCELERATE_USE_CPU": "true"},
            "fell back to MULTI_CPU: unset ACCELERATE_USE_CPU",
        ),
        ([*ACCELERATE, "fsdp2.yaml"], {}, "an FSDP launch fell back to"),
        ([*ACCELERATE[:2], "--cpu", "--num_processes=2"], {}, "was asked for several processes and started one"),
    ],
)
def test_a_launch_that_would_train_in_another_way_than_it_says_is_refused(job, tmp_path, command, environ, words):
    whole = [str(ROOT / "configs/accelerate" / word) if word.endswith(".yaml") else word for word in command]
    whole += ["-m", "distill", *job(tmp_path / "run")]
    done = subprocess.run(whole, capture_output=True, text=True, cwd=ROOT, env=environment() | environ, timeout=300)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launch", ["2 x ZeRO-2", slow("2 x DDP"), slow("2 x ZeRO-3"), slow("2 x FSDP2")])
def test_half_precision_trains_on_two_processes(alone, job, tmp_path, launch):
    """As the README launches the demo: the settings ask for bf16, the launcher does not."""
    half = ["train.mixed_precision=bf16", "teacher_dtype=bfloat16", "train.steps=20"]
    done = run(job(tmp_path / "two", *SETTINGS["eagle3"], *half, kind="eagle3"), launch)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(alone / "eagle3"), rel=0.05)


ROLLED = ["on_policy.fraction=0.5", "on_policy.by=pair", "on_policy.error_weight=2", "on_policy.max_new_tokens=12"]


@pytest.mark.parametrize(
    ("launch", "more"),
    [("2 x DDP", ["teacher=sharded"]), slow("2 x ZeRO-3", ["teacher=sharded"]), slow("2 x FSDP2", [])],
)
def test_p05_rolled_out_rows_of_different_lengths_leave_no_process_waiting(job, tmp_path, launch, more):
    run_here(job(tmp_path / "one", *ROLLED))
    done = run(job(tmp_path / "two", *ROLLED, *more), launch)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_the_literal_accelerate_launch_distill_works_from_the_checkout(alone, job):
    command = [*ACCELERATE[:2], "--num_processes", "1", "distill", *job(alone / "lm", *SETTINGS["lm"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "finished already" in done.stderr


def test_every_shipped_launch_configuration_is_tried_here_and_named_in_the_help():
    shipped = {path.stem for path in (ROOT / "configs/accelerate").glob("*.yaml")}
    tried = {Path(word).stem for launch in LAUNCHES.values() for word in launch if word.endswith(".yaml")}
    assert shipped == tried
    help_text = subprocess.run(
        [sys.executable, "-m", "distill", "--help"], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"COLUMNS": "300"},
    ).stdout  # fmt: skip
    assert all(name in help_text for name in shipped)


@pytest.mark.slow
def test_the_example_for_hosts_reached_by_ssh_trains_two_machines_as_one(alone, job, tmp_path):
    """Both are this machine; what stands in for ssh runs the command here."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec bash -c "$*"\n')
    (tmp_path / "ssh").chmod(0o755)
    command = [str(ROOT / "scripts/cluster/hostfile.sh"), str(tmp_path / "hosts"), str(tmp_path / "config.yaml")]
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    command += job(tmp_path / "run", *SETTINGS["eagle3"], kind="eagle3")
    there = environment() | {"LAUNCH": "zero3", "SSH": str(tmp_path / "ssh")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=there, timeout=300)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone / "eagle3"), rel=1e-4)
