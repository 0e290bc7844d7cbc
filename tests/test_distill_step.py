"""The chunked step against the dense one, and what it is fed with: batches, packing, the teacher."""

import pytest
import torch
from conftest import make_llama
from transformers import Lfm2Config, Lfm2ForCausalLM

from configs.errors import UserError
from distill.batches import collate, pack
from distill.objectives import (
    forward_kl,
    objective,
)
from distill.rows import Row
from distill.step import DistillStep, chunked_sum
from distill.students import LMStudent
from distill.teacher import Teacher, check_packing, check_plain_head, last_hidden

KL = objective("forward_kl")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
@pytest.mark.parametrize(("N", "V", "D", "E"), [(1, 7, 3, 5), (13, 101, 6, 4), (64, 33, 8, 8)])
def test_chunks_give_the_loss_and_the_gradients_of_the_dense_computation(N, V, D, E, chunk_tokens):
    torch.manual_seed(N)
    hidden, head = torch.randn(2, N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    teacher_hidden, teacher_head = torch.randn(N, E, dtype=torch.float64), torch.randn(V, E, dtype=torch.float64)
    ours = [x.clone().requires_grad_() for x in (hidden, head)]
    dense = [x.clone().requires_grad_() for x in (hidden, head)]
    weights = torch.rand(2, N, dtype=torch.float64)

    def loss_of(places, q_logits):
        loss = forward_kl(teacher_hidden[places] @ teacher_head.T, q_logits) * weights[:, places]
        return loss, weights[:, places]

    loss, sums = chunked_sum(loss_of, *ours, chunk_tokens)
    expected = (forward_kl(teacher_hidden @ teacher_head.T, dense[0] @ dense[1].T) * weights).sum()
    torch.testing.assert_close(sums.double(), weights.sum(-1), rtol=1e-5, atol=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-9)


def make_batch(model, lengths):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()
        rows.append(Row(ids, [i >= length // 2 for i in range(length)]))
    return rows, collate([[row] for row in rows], torch.device("cpu"))


def step_loss(step, teacher, batch):
    signal = {"hidden": teacher.hidden(batch.ids, batch.predicts, batch.positions), "head": teacher.head_weight}
    return step(signal, ids=batch.ids, predicts=batch.predicts, positions=batch.positions)[0]


def test_a_draft_with_the_targets_weights_has_loss_zero():
    target = make_llama(60, layers=2, seed=0)
    _, batch = make_batch(target, [8, 5, 13])
    twin = make_llama(60, layers=2, seed=0)
    assert step_loss(DistillStep(LMStudent(twin), KL, chunk_tokens=4), Teacher(target), batch).item() == pytest.approx(
        0, abs=1e-5
    )


def test_the_step_equals_plain_pytorch_over_the_supervised_positions():
    target, draft = make_llama(60, layers=2, seed=0), make_llama(60, layers=1, seed=1)
    rows, batch = make_batch(target, [8, 5, 13])
    loss = step_loss(DistillStep(LMStudent(draft), KL, chunk_tokens=4), Teacher(target), batch)
    expected = 0.0
    for row in rows:
        ids = torch.tensor([row.ids])
        p, q = target(ids).logits[0, :-1], draft(ids).logits[0, :-1]
        kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
        expected += kl[torch.tensor(row.is_answer[1:])].sum().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_padding_changes_nothing():
    target, draft = make_llama(60, layers=2, seed=0), make_llama(60, layers=1, seed=1)
    rows, _ = make_batch(target, [8, 5])
    step, teacher = DistillStep(LMStudent(draft), KL), Teacher(target)
    together = step_loss(step, teacher, collate([[row] for row in rows], torch.device("cpu"))).item()
    apart = sum(step_loss(step, teacher, collate([[row]], torch.device("cpu"))).item() for row in rows)
    assert together == pytest.approx(apart, rel=1e-5)


def test_packed_rows_give_the_loss_and_gradients_of_rows_alone():
    target, draft = make_llama(60, layers=2, seed=0), make_llama(60, layers=2, seed=1)
    rows, apart = make_batch(target, [8, 5, 13, 4])
    step, teacher = DistillStep(LMStudent(draft), KL), Teacher(target)
    packed = collate(pack(rows, max_tokens=17), torch.device("cpu"))
    assert packed.ids.shape[0] < len(rows)
    found = []
    for batch in (apart, packed):
        draft.zero_grad()
        loss = step_loss(step, teacher, batch)
        loss.backward()
        found.append((loss.item(), [weight.grad.clone() for weight in draft.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_model_in_which_packed_rows_see_each_other_is_refused():
    ids = torch.arange(3, 27).unsqueeze(0)
    check_packing(make_llama(60, layers=2, seed=0), ids, "llama")
    shape = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(intermediate_size=64, num_hidden_layers=2, full_attn_idxs=[1], initializer_range=0.2, **shape)
    with pytest.raises(UserError, match="see each other"):
        check_packing(Lfm2ForCausalLM(config).eval(), ids, "lfm2")


def test_packing_uses_each_row_once_and_keeps_to_the_limit():
    rows = [Row([n] * n, [False] + [True] * (n - 1)) for n in (5, 9, 3, 3, 8, 2)]
    sequences = pack(rows, 10)
    assert sorted(row.ids[0] for rows in sequences for row in rows) == [2, 3, 3, 5, 8, 9]
    assert all(sum(len(row.ids) for row in rows) <= 10 for rows in sequences)
    batch = collate(sequences, torch.device("cpu"))
    assert batch.predicts.sum() == sum(row.supervised for row in rows)


def test_the_teacher_is_in_evaluation_mode_without_gradients_and_no_part_of_the_step():
    target, draft = make_llama(60, layers=2, seed=0).train(), make_llama(60, layers=1, seed=1)
    step, teacher = DistillStep(LMStudent(draft), KL), Teacher(target)
    _, batch = make_batch(target, [8])
    before = {k: v.clone() for k, v in target.state_dict().items()}
    step.train()
    step_loss(step, teacher, batch).backward()
    assert not target.training
    assert draft.training
    assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())
    ours = {id(p) for p in step.parameters()}
    assert ours == {id(p) for p in draft.parameters()}


def test_teacher_hidden_states_and_head_give_the_targets_logits():
    target = make_llama(60, layers=2, seed=0)
    _, batch = make_batch(target, [8, 5])
    with torch.no_grad():
        logits = last_hidden(target, batch.ids) @ Teacher(target).head_weight.T
        torch.testing.assert_close(logits, target(batch.ids).logits)


def test_a_draft_that_is_no_longer_finite_shows_as_a_loss_that_is_not():
    p_logits = torch.randn(2, 5)
    assert torch.isnan(forward_kl(p_logits, torch.full((2, 5), torch.nan))).all()
    assert torch.isinf(forward_kl(p_logits, torch.tensor([[0.0, 0.0, 0.0, 0.0, -torch.inf]] * 2))).all()


def test_the_step_trains_under_autocast():
    target, draft = make_llama(60, layers=2, seed=0), make_llama(60, layers=1, seed=1)
    _, batch = make_batch(target, [8, 5])
    step, teacher = DistillStep(LMStudent(draft), KL), Teacher(target)
    exact = step_loss(step, teacher, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step_loss(step, teacher, batch)
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert all(p.grad.isfinite().all() for p in draft.parameters())


def test_a_model_that_does_more_than_multiply_by_its_head_is_refused():
    import transformers

    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    ids = torch.tensor([[5, 9, 30]])
    check_plain_head(make_llama(60, layers=1, seed=0), ids, "llama")
    torch.manual_seed(0)
    capped = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**shape, final_logit_softcapping=0.05, initializer_range=0.3)
    )
    with pytest.raises(UserError, match="gemma2 model changes its logits after the head"):
        check_plain_head(capped.eval(), ids, "capped")
