"""The training loop on a module of one weight: budgets, steps that are left out, SIGTERM, early stop, resuming."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from configs.errors import UserError
from train.hook import Measured
from train.loop import TrainSettings, train
from train.optim import OptimSettings

TOKENS = 10


class Parabola(nn.Module):
    """Summed loss 10 (w - x)² over the ten tokens of each row x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.seen: list[float] = []

    def forward(self, x):
        self.seen += x.tolist()
        loss = TOKENS * sum((self.weight - row).square().mean() for row in x)
        return loss, torch.tensor([[0.5 * TOKENS * len(x), TOKENS * len(x)]])


class Steps:
    """`rows` rows a step, in micro-batches of `micro_rows`: their numbers, or what `special` says."""

    def __init__(self, special=None, on_step=None, rows=1, micro_rows=1):
        self.special, self.on_step, self.rows, self.micro_rows = special or {}, on_step, rows, micro_rows

    def micro_batches(self, step):
        if self.on_step:
            self.on_step(step)
        rows = [float(self.special.get(step, (step * self.rows + row) % 7)) for row in range(self.rows)]
        return [{"x": torch.tensor(rows[i : i + self.micro_rows])} for i in range(0, self.rows, self.micro_rows)]

    def supervised_tokens(self, step):
        return TOKENS * self.rows

    planned_tokens = supervised_tokens


class Scores:
    """Scores that are known beforehand, with evidence that is the score itself."""

    score = "tau"

    def __init__(self, scores=(1.0,)):
        self.scores, self.measurements = list(scores), 0

    def measure(self):
        value = self.scores[min(self.measurements, len(self.scores) - 1)]
        self.measurements += 1
        return Measured({"tau": value}, {}, [[value]])

    def still_rises(self, before, now):
        return now[0][0] > before[0][0]


def run(folder: Path, batches=None, hook=None, module=None, kept=None, **settings):
    module, hook, batches = module or Parabola(), hook or Scores(), batches or Steps()
    settings = TrainSettings(optim=OptimSettings(learning_rate=0.1, warmup_steps=2), **{"steps": 12} | settings)
    keep = (kept if kept is not None else []).append
    folder.mkdir(exist_ok=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=batches.rows // batches.micro_rows)
    progress = train(
        accelerator, module, ["alpha_1"], batches, settings, folder, hook,
        lambda progress, values: keep((progress.step, values["tau"])), lambda means: None,
    )  # fmt: skip
    return progress, module, hook


def logged(folder: Path, name: str) -> list:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_a_step_whose_gradient_is_not_finite_is_left_out_and_counted(tmp_path):
    progress, module, _ = run(tmp_path / "a", Steps({4: float("nan"), 7: float("inf")}))
    assert (progress.step, progress.skipped, progress.tokens) == (12, 2, 10 * TOKENS)
    assert torch.isfinite(module.weight).all()
    assert logged(tmp_path / "a", "loss")[4] is None
    assert logged(tmp_path / "a", "skipped_steps")[-1] == 2


def test_too_many_such_steps_in_a_row_end_the_run_with_what_to_change(tmp_path):
    bad = {step: float("nan") for step in range(3, 12)}
    with pytest.raises(UserError, match=r"step 6: .*not finite, for the 3. time in a row.*lower train.optim.learning"):
        run(tmp_path, Steps(bad), skipped_steps=2)


def test_bad_steps_that_are_not_in_a_row_do_not_end_it(tmp_path):
    progress, *_ = run(tmp_path, Steps({step: float("nan") for step in range(0, 12, 2)}), skipped_steps=1)
    assert progress.skipped == 6


def test_a_budget_of_tokens_ends_the_run_and_the_learning_rate_with_it(tmp_path):
    progress, *_ = run(tmp_path / "tokens", steps=100, max_tokens=55)
    assert (progress.step, progress.tokens) == (6, 60)
    run(tmp_path / "steps", steps=6)
    assert logged(tmp_path / "tokens", "learning_rate") == logged(tmp_path / "steps", "learning_rate")


def test_a_budget_of_time_ends_the_run_measured_and_saved(tmp_path):
    progress, _, hook = run(tmp_path, steps=10_000, max_minutes=1e-9, measure_every=5000)
    assert progress.step == 1
    assert hook.measurements == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_code_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, number, code):
    whole, module, _ = run(tmp_path / "whole")
    before = signal.getsignal(number)

    def on_step(step):
        if step == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "stopped", Steps(on_step=on_step), save_every=100)
    assert stopped.value.code == code
    assert signal.getsignal(number) is before
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-000005"]
    progress, resumed, _ = run(tmp_path / "stopped", save_every=100)
    assert resumed.seen == module.seen[5:]
    assert torch.equal(resumed.weight, module.weight)
    assert (progress.step, progress.tokens) == (whole.step, whole.tokens)
    assert logged(tmp_path / "stopped", "loss") == logged(tmp_path / "whole", "loss")


@pytest.mark.parametrize("stop_at", [4, 9, 11])
def test_a_measurement_that_was_due_when_the_signal_came_is_made_when_the_run_goes_on(tmp_path, stop_at):
    """Steps 5 and 10 are measured, and 12, the last one."""
    scores, kept = [1, 3, 2, 5], []
    hook = Scores(scores)

    def on_step(step):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path, Steps(on_step=on_step), hook, kept=kept, measure_every=5)
    rest = Scores(scores[hook.measurements :])
    progress, *_ = run(tmp_path, hook=rest, kept=kept, measure_every=5)
    assert hook.measurements + rest.measurements == 4
    assert kept == [(0, 1), (5, 3), (12, 5)]
    assert (progress.step, progress.best_step) == (12, 12)
    assert logged(tmp_path, "held_out/tau") == scores


def test_a_run_may_go_on_with_other_micro_batches(tmp_path):
    """What fits may change: the rows of a step, and so its gradient, stay."""
    _, whole, _ = run(tmp_path / "whole", Steps(rows=4, micro_rows=1))

    def on_step(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path / "run", Steps(on_step=on_step, rows=4, micro_rows=2))  # ten micro-batches
    _, resumed, _ = run(tmp_path / "run", Steps(rows=4, micro_rows=1))
    assert torch.allclose(resumed.weight, whole.weight, rtol=1e-5)
    assert logged(tmp_path / "run", "loss") == pytest.approx(logged(tmp_path / "whole", "loss"), rel=1e-5)


def test_a_score_that_has_stopped_rising_ends_the_run_early(tmp_path):
    _, _, hook = run(tmp_path / "a", hook=Scores([1, 2, 3, 3, 3, 4, 5]), measure_every=1, patience=2)
    assert hook.measurements == 5  # 3, 3, 3
    _, _, hook = run(
        tmp_path / "b", hook=Scores([1, 2, 3, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 11]), measure_every=1, patience=2
    )
    assert hook.measurements == 13


def test_what_an_early_stop_needs_outlives_a_kill(tmp_path):
    def killed(step):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Steps(on_step=killed), Scores([1, 2, 3, 3]), measure_every=1, save_every=1, patience=2)
    progress, _, hook = run(tmp_path, hook=Scores([3, 9]), measure_every=1, save_every=1, patience=2)
    assert (progress.step, hook.measurements) == (4, 1)


def test_r02_a_worse_score_after_a_resume_does_not_become_the_best(tmp_path):
    kept = []

    def killed(step):
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Steps(on_step=killed), Scores([1, 5]), kept=kept, measure_every=5, save_every=6)
    progress, *_ = run(tmp_path, hook=Scores([4, 3]), kept=kept, measure_every=5, save_every=6)
    assert kept == [(0, 1), (5, 5)]
    assert (progress.best_score, progress.best_step) == (5, 5)
    rates = logged(tmp_path, "learning_rate")
    run(tmp_path / "whole", measure_every=5, save_every=6)
    assert rates == logged(tmp_path / "whole", "learning_rate")


def test_a_full_disk_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """The limit of file size stands in for a full disk: a write beyond it fails."""
    import resource

    def on_step(step):
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        (tmp_path / "run").mkdir()
        monkeypatch.setattr("train.tracking.Tracker.log", lambda *_: None)  # its lines would hit the limit first
        with pytest.raises(
            UserError, match=r"step-000008: cannot be written .*; make room there and start again: what was"
        ):
            run(tmp_path / "run", Steps(on_step=on_step), save_every=4, measure_every=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]
    progress, resumed, _ = run(tmp_path / "run", save_every=4)
    assert (progress.step, len(resumed.seen)) == (12, 8)


def test_a_tracker_that_fails_never_stops_training(tmp_path, capfd, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(Accelerator, "log", fail)
    progress, *_ = run(tmp_path, tracker="tensorboard")
    assert progress.step == 12
    assert capfd.readouterr().err.count("the server is gone; training goes on without it") == 1
    assert len(logged(tmp_path, "loss")) == 12
