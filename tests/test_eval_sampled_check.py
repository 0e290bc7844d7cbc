"""The certificate of a run that sampled: it passes what is lossless and fails what is not."""

import pytest
import torch

from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.lm import LMDraft
from decode.generation import Settings
from decode.laws import Law
from decode.models import load_model
from decode.verify import VERIFIERS, verify_by_token
from distill.build import build_eagle3_draft, build_lm_draft
from eval.sampled_check import _tree, check_sampling, p_value


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


def drafts(target):
    feature = build_eagle3_draft(target.model, (1, 2, 3), torch.arange(200), seed=0).eval()
    return {
        "lm": LMDraft(build_lm_draft(target.model, (0,)).eval()),
        "eagle3": Eagle3Draft(feature, target.model.get_input_embeddings()),
    }


PROMPTS = {"a": [5, 9, 30], "b": [7, 8]}


@pytest.mark.parametrize(("kind", "verifier"), [("lm", "token"), ("lm", "match"), ("eagle3", "block")])
def test_a_lossless_pair_passes_and_accepting_everything_would_not(target, kind, verifier):
    settings = Settings(Law(1.0, top_p=0.95), max_new_tokens=16, num_draft_tokens=2, verifier=verifier, seed=3)
    found = check_sampling(target.model, drafts(target)[kind], PROMPTS, settings, 300, target.tokenizer)
    assert found.failures == []
    assert found.law_p_value > 1e-3 > found.control_p_value
    assert found.seed_exact_tokens > 16


def accept_all(p, q, drafted, draws, position):
    """A verifier that is not lossless."""
    return torch.full((1,), drafted.shape[1]), draws.choose(p, position)[:, -1]


@pytest.mark.parametrize(("verifier", "said"), [("block", "target's law"), ("match", "same noise")])
def test_a_verifier_that_accepts_everything_fails(target, monkeypatch, verifier, said):
    monkeypatch.setitem(VERIFIERS, verifier, accept_all)
    settings = Settings(Law(1.0), max_new_tokens=16, num_draft_tokens=2, seed=3)
    found = check_sampling(target.model, drafts(target)["lm"], PROMPTS, settings, 300, target.tokenizer)
    assert all(said in failure for failure in found.failures)
    assert len(found.failures) == (1 if verifier == "block" else 2)


def test_a_verifier_that_is_wrong_only_for_longer_chains_fails_too(target, monkeypatch):
    monkeypatch.setitem(VERIFIERS, "block", lambda p, q, drafted, *rest: (
        accept_all if drafted.shape[1] > 1 else verify_by_token)(p, q, drafted, *rest))  # fmt: skip
    settings = Settings(Law(1.0), max_new_tokens=16, num_draft_tokens=3, seed=3)
    found = check_sampling(target.model, drafts(target)["lm"], PROMPTS, settings, 300, target.tokenizer)
    assert any("target's law" in failure for failure in found.failures)


def test_a_prompt_without_room_for_short_answers_is_passed_over(target):
    long = {"long": [5] * (target.context_tokens - 4)}
    settings = Settings(Law(1.0), max_new_tokens=4, num_draft_tokens=3, seed=3)
    found = check_sampling(target.model, drafts(target)["lm"], long, settings, 50, target.tokenizer)
    assert (found.failures, found.law_samples, found.law_p_value) == ([], 0, None)


def test_a_p_value_counts_rare_answers_together_and_impossible_ones_as_failures():
    expected = {(0,): 0.5, (1,): 0.49, (2,): 0.01}
    assert p_value({(0,): 50, (1,): 49, (2,): 1}, expected, 100) == pytest.approx(1.0)
    assert p_value({(0,): 90, (1,): 10}, expected, 100) < 1e-6
    assert p_value({(0,): 50, (3,): 50}, expected, 100) == 0.0
    assert p_value({(0,): 100}, {(0,): 1.0}, 100) == 1.0


def test_the_law_of_short_answers_is_the_product_of_its_steps():
    law = torch.tensor([0.25, 0.75])
    answers = _tree([9], lambda text: law if len(text) < 3 else law.flip(0))
    assert len(answers) == 8
    assert sum(answers.values()) == pytest.approx(1.0)
    assert answers[0, 1, 0] == pytest.approx(0.25 * 0.75 * 0.75)
