"""The teacher's log-probabilities on disk: what is stored, what is refused, and training from them."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_llama

from configs.errors import UserError
from distill.batches import collate
from distill.logit_cache import (
    CacheSettings,
    LogitCache,
    Signal,
    bytes_per_token,
    check_taps,
    read_manifest,
    scored_by,
    whole_bytes,
    write_cache,
)
from distill.objectives import NAMES, cached_columns, forward_kl, objective, online_columns
from distill.rows import Row
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher

IDENTITY = {"target": {"revision": "a"}, "data_sha256": "b", "top_k": 8}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher():
    return Teacher(make_llama(90, layers=2, seed=0))


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 14, 5, 20, 7, 11, 16]
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return [Row(text, [i > 2 for i in range(len(text))], number) for number, text in enumerate(ids)]


def write(teacher, rows, settings, identity):
    return write_cache(scored_by(teacher), rows, settings, identity, vocabulary=90)


def settings(folder, **changes):
    return CacheSettings(**({"folder": folder, "top_k": 8, "shard_tokens": 12} | changes))


def test_what_is_stored_are_the_true_log_probabilities_and_the_rest_of_the_mass(teacher, rows, tmp_path):
    manifest = write(teacher, rows, settings(tmp_path), IDENTITY)
    assert len(manifest.shards) > 2
    assert manifest.tokens == sum(row.supervised for row in rows)
    cache = LogitCache(tmp_path, rows, IDENTITY)
    for row in rows:
        signal = cache.signal(row)
        batch = collate([[row]], CPU)
        p = (teacher.hidden(batch.ids, batch.predicts) @ teacher.head_weight.T).double().softmax(-1)
        top = p.topk(8, dim=-1)
        assert torch.equal(signal.top_ids, top.indices)
        torch.testing.assert_close(signal.top_logp.double(), top.values.log(), atol=4e-3, rtol=0)
        torch.testing.assert_close(signal.tail.double(), 1 - top.values.sum(-1), atol=1e-6, rtol=1e-4)


def test_the_bytes_of_a_token_are_what_is_said_before(teacher, rows, tmp_path):
    assert bytes_per_token(64, 49_152) == 260
    assert bytes_per_token(64, 151_936) == 388
    manifest = write(teacher, rows, settings(tmp_path, shard_tokens=10**6), IDENTITY)
    size = (tmp_path / manifest.shards[0].file).stat().st_size
    assert 0 < size - manifest.tokens * bytes_per_token(8, 90) < 400  # the header


def test_a_killed_run_goes_on_at_its_last_whole_shard(teacher, rows, tmp_path):
    whole = write(teacher, rows, settings(tmp_path / "whole"), IDENTITY)
    calls = []

    class Dying(Teacher):
        def read(self, *arguments, **options):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return super().read(*arguments, **options)

    with pytest.raises(KeyboardInterrupt):
        write(Dying(teacher._model), rows, settings(tmp_path / "part"), IDENTITY)
    with pytest.raises(UserError, match="no finished cache"):
        read_manifest(tmp_path / "part", IDENTITY)
    counted = []

    class Counting(Teacher):
        def read(self, *arguments, **options):
            counted.append(1)
            return super().read(*arguments, **options)

    again = write(Counting(teacher._model), rows, settings(tmp_path / "part"), IDENTITY)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in whole.shards]
    assert len(counted) == len(whole.shards) - 2
    assert write(Dying(teacher._model), rows, settings(tmp_path / "part"), IDENTITY) == again


def test_a_cache_of_something_else_is_refused_by_what_differs(teacher, rows, tmp_path):
    write(teacher, rows, settings(tmp_path), IDENTITY)
    other = IDENTITY | {"target": {"revision": "c"}}
    for use in (
        lambda: LogitCache(tmp_path, rows, other),
        lambda: write(teacher, rows, settings(tmp_path), other),
    ):
        with pytest.raises(UserError, match=r"different: target\.revision"):
            use()
    with pytest.raises(UserError, match="the data has other rows"):
        LogitCache(tmp_path, rows[:-1], IDENTITY)


def test_a_corrupt_foreign_or_missing_shard_is_named(teacher, rows, tmp_path):
    write(teacher, rows, settings(tmp_path), IDENTITY)
    shards = sorted(tmp_path.glob("shard-*"))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: not the shard"):
        LogitCache(tmp_path, rows, IDENTITY)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(UserError, match="shard-00001"):
        LogitCache(tmp_path, rows, IDENTITY)
    shards[1].unlink()
    with pytest.raises(UserError, match="shard-00001"):
        LogitCache(tmp_path, rows, IDENTITY)


def top_forward_kl(signal, q_logits):
    columns = cached_columns(signal.top_ids, signal.top_logp, signal.tail, q_logits)
    return forward_kl(columns.log_p, columns.log_q)


def exact_signal(p_logits, top_k):
    logp = p_logits.log_softmax(-1)
    top = logp.topk(top_k, dim=-1)
    return Signal(top.indices, top.values, logp.exp().scatter(-1, top.indices, 0.0).sum(-1))


def test_the_loss_of_the_top_is_a_lower_bound_with_the_gradient_of_its_closed_form():
    generator = torch.Generator().manual_seed(1)
    p_logits, q_logits = (3 * torch.randn(6, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    q_logits.requires_grad_()
    whole = forward_kl(p_logits, q_logits)
    signal = exact_signal(p_logits, 5)
    loss = top_forward_kl(signal, q_logits)
    assert (loss <= whole + 1e-12).all()
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    expected = (q * (1 - (signal.tail / (1 - q.gather(-1, signal.top_ids).sum(-1))).unsqueeze(-1))).scatter(
        -1, signal.top_ids, (q - p).gather(-1, signal.top_ids)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), q_logits)
    torch.testing.assert_close(gradient, expected)
    every = top_forward_kl(exact_signal(p_logits, 40), q_logits)
    torch.testing.assert_close(every, whole, atol=1e-9, rtol=1e-9)


def test_over_a_trimmed_head_the_law_is_renormalised_over_what_the_head_holds():
    generator = torch.Generator().manual_seed(2)
    p_logits = 2 * torch.randn(5, 30, generator=generator, dtype=torch.float64)
    head = torch.tensor([1, 4, 9, 12, 20, 29])
    q_logits = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    within = exact_signal(p_logits, 30).within(head, 30)
    found = top_forward_kl(within, q_logits)
    torch.testing.assert_close(found, forward_kl(p_logits[:, head], q_logits), atol=1e-6, rtol=1e-6)
    covered = exact_signal(p_logits, 28).within(head, 30)
    assert top_forward_kl(covered, q_logits).isfinite().all()
    some = exact_signal(p_logits, 8).within(head, 30)
    assert top_forward_kl(some, q_logits).isfinite().all()
    inside = torch.isin(exact_signal(p_logits, 8).top_ids, head)
    mass = exact_signal(p_logits, 8).top_logp.exp().masked_fill(~inside, 0).sum(-1)
    torch.testing.assert_close(some.top_logp.exp().sum(-1), mass)  # the original law, not renormalised


@pytest.mark.parametrize("top_k", [2, 5, 12])
def test_over_a_trimmed_head_the_gradient_is_within_the_stated_bound(top_k):
    """2 t / (k + t): t the tail's mass, k that of the kept ids inside the head."""
    generator = torch.Generator().manual_seed(5)
    p_logits = 2 * torch.randn(200, 30, generator=generator, dtype=torch.float64)
    head = torch.tensor([1, 4, 9, 12, 20, 29])
    q_logits = torch.randn(200, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    signal = exact_signal(p_logits, top_k).within(head, 30)
    (exact,) = torch.autograd.grad(forward_kl(p_logits[:, head], q_logits).sum(), q_logits)
    (found,) = torch.autograd.grad(top_forward_kl(signal, q_logits).sum(), q_logits)
    kept = signal.top_logp.exp().sum(-1)
    bound = 2 * signal.tail / (kept + signal.tail).clamp(min=1e-12)
    known = kept > 0
    assert ((found - exact).abs().sum(-1)[known] <= bound[known] + 1e-9).all()


@pytest.mark.parametrize("name", NAMES)
def test_over_a_trimmed_head_every_objective_has_the_gradient_of_its_differences(name):
    """Ids that the head lacks are columns with nothing on either side."""
    generator = torch.Generator().manual_seed(7)
    p_logits = 2 * torch.randn(3, 30, generator=generator, dtype=torch.float64)
    q_logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    signal = exact_signal(p_logits, 8).within(torch.tensor([1, 4, 9, 12, 20, 29]), 30)
    assert signal.top_logp.isneginf().any()

    def of(logits):
        columns = cached_columns(signal.top_ids, signal.top_logp, signal.tail, logits)
        return objective(name)(columns, torch.full((3,), 0.4, dtype=torch.float64))

    assert torch.autograd.gradcheck(of, (q_logits,))


def test_alpha_from_the_cache_is_a_lower_bound_short_by_at_most_the_tail():
    generator = torch.Generator().manual_seed(6)
    p_logits, q_logits = (2 * torch.randn(50, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = online_columns(p_logits, q_logits, None).alpha()
    torch.testing.assert_close(exact, torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1))
    signal = exact_signal(p_logits, 8)
    found = cached_columns(signal.top_ids, signal.top_logp, signal.tail, q_logits).alpha()
    assert (found <= exact + 1e-12).all()
    assert (exact <= found + signal.tail + 1e-12).all()


@pytest.mark.parametrize("top_k", [90, 8])
def test_training_from_the_cache_equals_online_training_within_the_stated_bound(teacher, rows, tmp_path, top_k):
    """With every id kept, to the rounding of float16; else the gradient at each token's logits is within 2 · tail."""
    draft = make_llama(90, layers=1, seed=3)
    step, batch = DistillStep(LMStudent(draft), objective("forward_kl")), collate([[row] for row in rows], CPU)
    hidden = teacher.hidden(batch.ids, batch.predicts)
    write(teacher, rows, settings(tmp_path, top_k=top_k), IDENTITY)
    cache = LogitCache(tmp_path, rows, IDENTITY)
    signals = [cache.signal(row) for row in rows]
    whole = {name: torch.cat([getattr(s, name) for s in signals]) for name in ("top_ids", "top_logp", "tail")}
    inputs = {"ids": batch.ids, "predicts": batch.predicts}
    online, _ = step({"hidden": hidden, "head": teacher.head_weight}, **inputs)
    cached, _ = step(whole, **inputs)
    gradients = []
    for loss in (online, cached):
        draft.zero_grad()
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in draft.parameters()]))
    if top_k == 90:
        assert cached.item() == pytest.approx(online.item(), rel=1e-3)
        assert (gradients[1] - gradients[0]).norm() < 2e-3 * gradients[0].norm()
    else:
        assert cached.item() < online.item()
    q_logits = draft(batch.ids).logits[batch.predicts].detach().requires_grad_()
    p_logits = hidden @ teacher.head_weight.T
    (exact,) = torch.autograd.grad(forward_kl(p_logits, q_logits).sum(), q_logits)
    (found,) = torch.autograd.grad(top_forward_kl(Signal(**whole), q_logits).sum(), q_logits)
    assert ((found - exact).abs().sum(-1) <= 2 * whole["tail"] + 1e-2).all()


def test_a_manifest_says_whose_it_is_and_lies_last(teacher, rows, tmp_path):
    write(teacher, rows, settings(tmp_path), IDENTITY)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["identity"] == IDENTITY
    assert not (tmp_path / "unfinished.json").exists()
    assert {shard["file"] for shard in manifest["shards"]} == {path.name for path in tmp_path.glob("shard-*")}
    assert Path(tmp_path / "manifest.json").stat().st_mtime >= max(p.stat().st_mtime for p in tmp_path.glob("shard-*"))


def test_scores_of_a_server_and_of_this_process_are_not_mixed(teacher, rows, tmp_path):
    class Dying(Teacher):
        def read(self, *arguments, **options):
            if (tmp_path / "unfinished.json").exists():
                raise KeyboardInterrupt
            return super().read(*arguments, **options)

    with pytest.raises(KeyboardInterrupt):
        write(Dying(teacher._model), rows, settings(tmp_path), IDENTITY)
    with pytest.raises(UserError, match="begun with scores by 'here'"):
        write_cache(scored_by(teacher), rows, settings(tmp_path), IDENTITY, 90, "engine")
    assert write(teacher, rows, settings(tmp_path), IDENTITY).scored_by == "here"


def test_a_place_of_which_the_head_holds_nothing_known_teaches_nothing():
    signal = Signal(torch.tensor([[3, 4]]), torch.tensor([[-0.5, -1.0]]), torch.tensor([0.0]))
    within = signal.within(torch.tensor([0, 1, 2]), 9)
    q_logits = torch.randn(1, 3, requires_grad=True)
    loss = top_forward_kl(within, q_logits)
    assert loss.item() == 0
    assert torch.autograd.grad(loss.sum(), q_logits)[0].abs().max() == 0


def test_tapped_hidden_states_of_every_token_are_kept_beside(teacher, rows, tmp_path):
    manifest = write(teacher, rows, settings(tmp_path, taps=(0, 2)), IDENTITY)
    cache = LogitCache(tmp_path, rows, IDENTITY)
    for row in rows:
        output = teacher._model(input_ids=torch.tensor([row.ids]), output_hidden_states=True)
        expected = torch.cat([output.hidden_states[0], output.hidden_states[2]], dim=-1)[0]
        torch.testing.assert_close(cache.tapped(row).float(), expected, atol=1e-2, rtol=1e-2)
        assert cache.signal(row).tail.shape == (row.supervised,)
    on_disk = sum((tmp_path / shard.file).stat().st_size for shard in manifest.shards)
    said = whole_bytes(rows, settings(tmp_path, taps=(0, 2)), teacher._model.config)
    assert 0 < on_disk - said < 500 * len(manifest.shards)  # the headers


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 1)])
def test_a_hidden_state_that_the_target_lacks_is_refused(teacher, taps):
    check_taps((0, 1, 2), teacher._model.config)
    with pytest.raises(UserError, match=r"expected different ones out of 0\.\.2"):
        check_taps(taps, teacher._model.config)
