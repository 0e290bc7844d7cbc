"""Training a feature draft: the unrolled step, and the whole job on tiny models from launch to report."""

import json
import subprocess
import sys
import time

import pytest
import torch
from conftest import make_llama
from jobs import BIN, LAUNCHES, ROOT, environment, losses, metrics, run_decode, run_here

from configs.errors import UserError
from configs.reader import read_config
from distill.batches import collate, pack
from distill.build import build_eagle3_draft
from distill.job_settings import JobSettings
from distill.logit_cache import Signal
from distill.objectives import forward_kl, objective, total_variation
from distill.rows import Row
from distill.step import DistillStep
from distill.students import Eagle3Student
from distill.teacher import Teacher

CPU, TAPS, STEPS = torch.device("cpu"), (0, 1, 2), 3


@pytest.fixture(scope="module")
def teacher():
    return Teacher(make_llama(90, layers=2, seed=0))


@pytest.fixture
def draft(teacher):
    return build_eagle3_draft(teacher._model, TAPS, torch.arange(0, 90, 3), seed=0)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in (14, 9, 17)]
    return [Row(text, [i > 4 and i != 8 for i in range(len(text))], number) for number, text in enumerate(ids)]


def step_for(draft, name="forward_kl", step_decay=0.8, **settings):
    return DistillStep(Eagle3Student(draft, STEPS), objective(name, **settings), step_decay, 4, draft.draft_ids)


def inputs_of(teacher, batch):
    last, tapped = teacher.read(batch.ids, batch.predicts, batch.positions, TAPS)
    return {
        "signal": {"hidden": last, "head": teacher.head_weight}, "ids": batch.ids, "predicts": batch.predicts,
        "positions": batch.positions, "tapped": tapped, "embedded": teacher.embedded(batch.ids),
    }  # fmt: skip


def test_the_loss_is_that_of_drafting_from_every_place_worked_out_one_by_one(teacher, draft, rows):
    """Each supervised token as number 1, 2, 3 of a round that began so many tokens before, by the draft's own chain."""
    step = step_for(draft, name="hybrid", eta=2.0, step_decay=0.7)
    step.learn([0.3, 0.2, 0.1])
    loss, sums = step(**inputs_of(teacher, collate([[row] for row in rows], CPU)))
    expected, alphas = 0.0, torch.zeros(STEPS, 2)
    for row in rows:
        ids = torch.tensor([row.ids])
        output = teacher._model(input_ids=ids, output_hidden_states=True)
        log_p = output.logits[0].log_softmax(-1)[:, draft.draft_ids]
        features = draft.fc(torch.cat([output.hidden_states[tap] for tap in TAPS], dim=-1))
        embedded = teacher.embedded(ids)
        for place in (i - 1 for i in range(1, len(row.ids)) if row.is_answer[i]):
            for k in range(STEPS):
                entry = place - 1 - k
                if entry < 0:
                    continue
                whole = torch.arange(entry + 1).unsqueeze(0)
                hidden, past = draft(embedded[:, 1 : entry + 2], features[:, : entry + 1], whole, first=entry)
                for chained in range(1, k + 1):
                    token = embedded[:, entry + 1 + chained : entry + 2 + chained]
                    hidden, past = draft(token, hidden, torch.tensor([[entry + chained]]), past)
                log_q = draft.logits(hidden)[0].log_softmax(-1)
                weight = torch.tensor(-2.0 * [0.3, 0.2, 0.1][k]).exp()
                kl = forward_kl(log_p[place : place + 1], log_q)
                tv = total_variation(log_p[place : place + 1], log_q)
                expected += 0.7**k * float((weight * kl + (1 - weight) * tv).sum())
                alphas[k] += torch.tensor([1 - float(tv.sum()), 1.0])
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(sums[:STEPS], alphas, rtol=1e-4, atol=1e-4)
    weighted = sum(0.7**k * sums[STEPS + k, 0] for k in range(STEPS))
    assert float(weighted) == pytest.approx(float(loss), rel=1e-5)


def test_padding_and_packing_change_neither_loss_nor_gradients(teacher, draft, rows):
    step, found = step_for(draft), []
    apart = [collate([[row]], CPU) for row in rows]
    for batches in (apart, [collate([[row] for row in rows], CPU)], [collate(pack(rows, 40), CPU)]):
        draft.zero_grad()
        loss = sum(step(**inputs_of(teacher, batch))[0] for batch in batches)
        loss.backward()
        found.append((loss.item(), [weight.grad.clone() for weight in draft.parameters()]))
    assert batches[0].positions is not None
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for one, other in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_from_the_cached_signal_the_loss_and_alpha_are_the_online_ones(teacher, draft, rows):
    """Every id kept, so that nothing is lost but rounding."""
    inputs = inputs_of(teacher, collate([[row] for row in rows], CPU))
    p_logits = inputs["signal"]["hidden"] @ teacher.head_weight.T
    top = p_logits.log_softmax(-1).topk(90, dim=-1)
    signal = Signal(top.indices, top.values, torch.zeros(len(p_logits))).within(draft.draft_ids, 90)
    for name in ("forward_kl", "negative_log_alpha", "hybrid"):
        step = step_for(draft, name=name)
        online, cached = step(**inputs), step(**inputs | {"signal": vars(signal)})
        assert cached[0].item() == pytest.approx(online[0].item(), rel=1e-4)
        torch.testing.assert_close(cached[1], online[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["draft.kind=eagle3", "draft.layers=[0]"], "layers has no effect on a draft of kind eagle3"),
        (["draft.unroll_steps=2"], "unroll_steps has no effect on a draft of kind lm"),
        (["draft.kind=eagle3", "on_policy.fraction=0.1"], "cannot write without its target"),
        (["objective.beta=0.2"], "beta has no effect on forward_kl, only on jensen_shannon"),
        (["objective.name=jensen_shannon", "objective.eta=1"], "eta has no effect on jensen_shannon"),
        (["objective.step_decay=0.5"], "step_decay has no effect on a draft that is not unrolled"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_refused(overrides, words):
    with pytest.raises(ValueError, match=words):
        read_config(JobSettings, None, ["target=x", *overrides])


@pytest.fixture(scope="module")
def finished(job, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "eagle3"
    run_here(job(output, *HYBRID, kind="eagle3"))
    return output


HYBRID = ["objective.name=hybrid", "draft.vocabulary=200", "draft.taps=[0,1,3]"]


def test_a_feature_draft_trains_decodes_losslessly_and_is_measured(finished, tiny_target, tmp_path):
    assert losses(finished)[-1] < 0.9 * losses(finished)[0]
    first, *_, last = [row for row in metrics(finished) if "held_out/alpha" in row]
    assert last["held_out/alpha"] > first["held_out/alpha"]
    assert {"held_out/alpha_2", "held_out/alpha_3", "held_out/tau"} <= last.keys()
    drafted = run_decode(tiny_target, finished / "draft")
    assert drafted["token_ids"] == run_decode(tiny_target)["token_ids"]
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Who sells tea?", "Which pump?")))
    command = [sys.executable, "-m", "eval", "--target", tiny_target, "--draft", finished / "draft", "--out", tmp_path,
               "--suite", suite, "--max-new-tokens", "24", "--num-draft-tokens", "2"]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["certificate"]["passed"]
    assert report["acceptance"]["tau"] >= 1.0


def test_a_run_that_stopped_goes_on_with_the_mean_alpha_it_had(finished, job, tmp_path, capfd):
    """Killed after its first checkpoint, which is all that is left."""
    output = tmp_path / "stopped"
    first = subprocess.Popen([*LAUNCHES["1 process"], *job(output, *HYBRID, kind="eagle3")], cwd=ROOT,
                             env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while not list((output / "checkpoints").glob("step-??????")) and first.poll() is None:
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert not (output / "done.json").exists()
    run_here(job(output, *HYBRID, kind="eagle3"))
    assert "resuming after step" in capfd.readouterr().err
    assert losses(output) == pytest.approx(losses(finished), rel=1e-6)


def test_training_from_a_cache_with_hidden_states_needs_the_same_taps(job, tmp_path):
    folder = tmp_path / "cache"
    same = [*HYBRID, f"cache.folder={folder}", "cache.top_k=300"]
    with pytest.raises(UserError, match=r"set cache.taps=\[0,1,3\]"):
        run_here(job(tmp_path / "run", *same, kind="eagle3"))
    same.append("cache.taps=[0,1,3]")
    command = [str(BIN / "draftsmith"), "data", "cache", *job(tmp_path / "run", *same, kind="eagle3")]
    written = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert written.returncode == 0, written.stderr
    run_here(job(tmp_path / "run", *same, kind="eagle3"))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


@pytest.mark.parametrize("half", [["train.mixed_precision=bf16"], ["teacher_dtype=bfloat16"]])
def test_half_precision_gives_nearly_the_same_losses(finished, job, tmp_path, half):
    output = tmp_path / "half"
    run_here(job(output, *HYBRID, *half, kind="eagle3"))
    assert losses(output) == pytest.approx(losses(finished), rel=0.05)
    assert losses(output) != losses(finished)
