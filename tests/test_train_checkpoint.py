"""Checkpoints: whole or absent, pruned afterwards, never resumed by the wrong number of processes."""

import json
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator

from configs.errors import UserError
from train.checkpoint import Progress, load_checkpoint, save_checkpoint
from train.optim import OptimSettings, build_optimizer, learning_rate


@pytest.fixture
def prepared():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimSettings())
    return (accelerator, *accelerator.prepare(model, optimizer))


def take_step(model, optimizer):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_brings_back_weights_optimiser_and_progress(prepared, tmp_path):
    accelerator, model, optimizer = prepared
    take_step(model, optimizer)
    save_checkpoint(accelerator, tmp_path, Progress(step=1, tokens=5, best_score=1.5, best_step=1), keep=1)
    take_step(model, optimizer)
    expected = model.weight.detach().clone()
    loaded = load_checkpoint(accelerator, tmp_path)
    assert (loaded.step, loaded.tokens, loaded.best_score, loaded.best_step) == (1, 5, 1.5, 1)
    assert (loaded.processes, loaded.launch, loaded.threads) == (1, "NO x 1", torch.get_num_threads())
    assert not torch.equal(model.weight, expected)
    take_step(model, optimizer)
    assert torch.equal(model.weight, expected)


def test_only_the_newest_are_kept_and_a_cut_off_one_is_passed_over(prepared, tmp_path):
    accelerator, *_ = prepared
    for step in (9, 10, 11):
        save_checkpoint(accelerator, tmp_path, Progress(step=step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000011"]
    (tmp_path / "step-000012.tmp").mkdir()
    assert load_checkpoint(accelerator, tmp_path).step == 11
    save_checkpoint(accelerator, tmp_path, Progress(step=12), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


def test_a_checkpoint_of_which_a_part_is_missing_is_passed_over(prepared, tmp_path):
    accelerator, *_ = prepared
    for step in (1, 2, 3):
        save_checkpoint(accelerator, tmp_path, Progress(step=step), keep=3)
    weights = tmp_path / "step-000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "step-000002" / "optimizer.bin").unlink()
    assert load_checkpoint(accelerator, tmp_path).step == 1


def test_the_one_that_is_whole_outlives_newer_ones_that_are_not(prepared, tmp_path, capsys):
    """Resumed from 50 past a torn 100, a run saves 75: neither is 50's successor lost, nor does 100 stay the newest."""
    accelerator, *_ = prepared
    for step in (50, 100):
        save_checkpoint(accelerator, tmp_path, Progress(step=step), keep=2)
    (tmp_path / "step-000100" / "optimizer.bin").unlink()
    save_checkpoint(accelerator, tmp_path, Progress(step=75), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000075"]
    (tmp_path / "step-000075" / "optimizer.bin").unlink()
    assert load_checkpoint(accelerator, tmp_path) == Progress()
    assert "no checkpoint is whole; starting from the beginning" in capsys.readouterr().err


def test_checkpoints_are_ordered_by_number(prepared, tmp_path):
    accelerator, *_ = prepared
    for step in (999_999, 1_000_000):
        save_checkpoint(accelerator, tmp_path, Progress(step=step), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1000000"]


def test_another_kind_of_launch_is_refused(prepared, tmp_path):
    accelerator, *_ = prepared
    save_checkpoint(accelerator, tmp_path, Progress(step=1), keep=1)
    path = tmp_path / "step-000001" / "progress.json"
    path.write_text(path.read_text().replace("NO x 1", "FSDP2 x 1"))
    with pytest.raises(UserError, match=r"saved by FSDP2 x 1 .* resumed by NO x 1; launch as before"):
        load_checkpoint(accelerator, tmp_path)


def test_without_a_checkpoint_a_run_starts_afresh(prepared, tmp_path):
    assert load_checkpoint(prepared[0], tmp_path) == Progress(step=0)


def test_another_number_of_processes_is_refused_with_what_to_do(prepared, tmp_path):
    accelerator, *_ = prepared
    save_checkpoint(accelerator, tmp_path, Progress(step=1), keep=1)
    path = tmp_path / "step-000001" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 4}))
    with pytest.raises(UserError, match=r"saved by 4 processes.*--num_processes 4"):
        load_checkpoint(accelerator, tmp_path)


def test_the_learning_rate_rises_falls_and_is_a_function_of_the_step_alone():
    settings = OptimSettings(learning_rate=1.0, final_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(step, 20, settings) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert learning_rate(20, 20, settings) == pytest.approx(0.1)
    assert learning_rate(12, 20, settings) == pytest.approx(0.55)


def test_weight_decay_is_for_matrices_only():
    optimizer = build_optimizer(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)), OptimSettings())
    decayed, free = optimizer.param_groups
    assert [p.ndim for p in decayed["params"]] == [2]
    assert {p.ndim for p in free["params"]} == {1}
    assert free["weight_decay"] == 0.0
