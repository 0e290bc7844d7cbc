"""Answers rolled out during training: whose law they follow, where the verifier rejected, and that runs repeat."""

import pytest
import torch
from conftest import make_llama

from configs.reader import read_config
from decode.drafts.head import trim_head
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.stops import Stops
from distill.batches import collate
from distill.build import build_lm_draft
from distill.job_settings import JobSettings
from distill.objectives import forward_kl, objective
from distill.on_policy import OnPolicy, OnPolicySettings
from distill.rows import Row
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher

ROWS = [Row([5, 9, 30 + i, 7, 8], [False, False, False, True, True], i) for i in range(60)]


@pytest.fixture(scope="module")
def target():
    return make_llama(90, layers=3, seed=0)


@pytest.fixture
def draft(target):
    return build_lm_draft(target, (0, 1)).eval()


def rollouts(draft, target, law=None, eos_ids=(), seed=0, **settings):
    return OnPolicy(
        OnPolicySettings(**({"max_new_tokens": 12} | settings)),
        LMDraft(draft, 90),
        target,
        law or Law(1.0),
        eos_ids,
        seed,
    )


def test_the_asked_for_share_of_rows_is_rolled_out_and_the_same_ones_again(draft, target):
    some = rollouts(draft, target, fraction=0.4)
    rewritten = [some.rewrite(3, row) for row in ROWS]
    changed = [row.ids != old.ids for row, old in zip(rewritten, ROWS, strict=True)]
    assert 12 <= sum(changed) <= 36
    assert [some.rewrite(3, row).ids for row in ROWS] == [row.ids for row in rewritten]
    assert [some.rewrite(4, row).ids for row in ROWS] != [row.ids for row in rewritten]
    assert all(new.ids[:3] == old.ids[:3] for new, old in zip(rewritten, ROWS, strict=True))


def test_the_drafts_own_text_is_what_the_draft_would_sample_or_choose(draft, target):
    row = rollouts(draft, target, Law(0.0), fraction=1.0).rewrite(0, ROWS[0])
    greedy = generate_ids(draft, None, ROWS[0].ids[:3], Settings(max_new_tokens=12)).token_ids
    assert row.ids[3:] == greedy
    assert row.is_answer == [False] * 3 + [True] * 12
    ended = rollouts(draft, target, Law(0.0), (greedy[4],), fraction=1.0).rewrite(0, ROWS[0])
    assert ended.ids[3:] == greedy[: greedy.index(greedy[4]) + 1]


def test_a_trimmed_draft_rolls_out_the_targets_ids(draft, target):
    kept = torch.tensor([3, 40, 41, 60, 77])
    trim_head(draft, kept)
    row = rollouts(draft, target, fraction=1.0).rewrite(0, ROWS[0])
    assert set(row.ids[3:]) <= set(kept.tolist())


def test_the_pairs_text_is_the_targets_and_the_rejected_places_have_the_weight(draft, target):
    pair = rollouts(draft, target, Law(0.0), by="pair", fraction=1.0, error_weight=5.0, max_new_tokens=20)
    row = pair.rewrite(0, ROWS[1])
    settings = Settings(max_new_tokens=20, num_draft_tokens=3, stops=Stops())
    assert row.ids[3:] == generate_ids(target, None, ROWS[1].ids[:3], settings).token_ids
    best = draft(torch.tensor([row.ids])).logits[0].argmax(-1)
    heavy = [place for place, weight in enumerate(row.weights) if weight == 5.0]
    assert heavy
    assert all(int(best[place - 1]) != row.ids[place] for place in heavy)


def test_weights_multiply_the_loss_of_their_tokens(draft, target):
    plain = Row([5, 9, 30, 7, 8, 12], [False, False, True, True, True, True])
    heavy = Row(plain.ids, plain.is_answer, 0, [1.0, 1.0, 1.0, 4.0, 1.0, 2.0])
    step, teacher = DistillStep(LMStudent(draft), objective("forward_kl"), chunk_tokens=3), Teacher(target)

    def loss(row):
        batch = collate([[row]], torch.device("cpu"))
        signal = {"hidden": teacher.hidden(batch.ids, batch.predicts), "head": teacher.head_weight}
        return step(signal, batch.weights, ids=batch.ids, predicts=batch.predicts)[0]

    ids = torch.tensor([plain.ids])
    kl = forward_kl(target(ids).logits[0, 1:-1], draft(ids).logits[0, 1:-1])
    assert loss(plain).item() == pytest.approx(kl.sum().item(), rel=1e-5)
    assert loss(heavy).item() == pytest.approx((kl * torch.tensor([1.0, 4.0, 1.0, 2.0])).sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["on_policy.fraction=0.5", "data.pack=true"], "neither a cache nor packed rows"),
        (["on_policy.fraction=0.5", "cache.folder=x"], "neither a cache nor packed rows"),
        (["on_policy.fraction=0.5", "on_policy.error_weight=2"], "error_weight has no effect"),
        (["on_policy.by=pair", "on_policy.error_weight=2"], "error_weight has no effect"),
    ],
)
def test_settings_without_effect_are_refused(overrides, words):
    with pytest.raises(ValueError, match=words):
        read_config(JobSettings, None, ["target=x", *overrides])
