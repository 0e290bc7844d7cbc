"""What a trace records and counts: against the models themselves, by hand, and against published figures."""

import pytest
import torch
from conftest import make_llama

from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.trace import Round, Tally, positions


@pytest.fixture(scope="module")
def target():
    return make_llama(vocabulary=120, layers=3, seed=0)


@pytest.fixture(scope="module")
def draft(target):
    from distill.build import build_lm_draft

    return LMDraft(build_lm_draft(target, (0, 1)).eval())


def test_the_recorded_probabilities_are_those_of_the_models(target, draft):
    """Each round's p, q and overlap, worked out again by full passes without any cache."""
    prompt, law = [17, 40, 3], Law(1.0)
    answer = generate_ids(target, draft, prompt, Settings(law, max_new_tokens=20, num_draft_tokens=3, seed=5))
    text = prompt + answer.token_ids[:1]
    for r in answer.rounds:
        whole = torch.tensor([text + list(r.drafted)])
        with torch.no_grad():
            p, q = (law(m(whole).logits[0, len(text) - 1 :]) for m in (target, draft.model))
        for j, token in enumerate(r.drafted):
            assert r.p[j] == pytest.approx(p[j, token].item(), abs=1e-5)
            assert r.q[j] == pytest.approx(q[j, token].item(), abs=1e-5)
            assert r.overlap[j] == pytest.approx(torch.minimum(p[j], q[j]).sum().item(), abs=1e-5)
        text += r.tokens


def make_round(drafted, accepted, tokens):
    n = drafted
    return Round(tuple(range(n)), accepted, tuple(range(tokens)), *[(0.5,) * n] * 5, 0.0, 0.0, 0.0, 0.0)


def test_positions_of_a_trace_counted_by_hand():
    """Six rounds: drafted, accepted, emitted. The last one is cut by an end token that was its first draft."""
    rounds = [make_round(*r) for r in [(4, 2, 3), (4, 4, 5), (4, 0, 1), (3, 2, 3), (0, 0, 1), (3, 1, 1)]]
    tally = Tally.of(rounds)
    assert (tally.drafted, tally.accepted, tally.emitted) == (18, 9, 14)
    assert tally.accepted_share == 0.5
    assert tally.tau == pytest.approx(14 / 6)
    conditional, joint = positions(rounds)
    assert conditional == pytest.approx([4 / 5, 3 / 3, 1 / 3, 1 / 1])
    assert joint == pytest.approx([4 / 5, 3 / 5, 1 / 5, 1 / 3])


def test_a_published_trace_gives_the_published_rates():
    """Six rounds, one without a draft: over offered .8 .6 .25 .25, given all before .8 .75 .5 1."""
    rounds = [make_round(*r) for r in [(4, 2, 3), (4, 4, 5), (4, 0, 1), (2, 2, 3), (0, 0, 1), (4, 1, 2)]]
    tally = Tally.of(rounds)
    assert (tally.accepted_share, tally.tau) == (0.5, 2.5)
    assert positions(rounds) == ([0.8, 0.75, 0.5, 1.0], [0.8, 0.6, 0.25, 0.25])


def test_an_empty_trace_has_no_rates():
    tally = Tally.of([])
    assert (tally.tau, tally.accepted_share) == (None, None)
    assert positions([]) == ([], [])


def test_entropies_are_those_of_the_two_laws(target, draft):
    law = Law(0.9, top_k=20)
    answer = generate_ids(target, draft, [17, 40], Settings(law, max_new_tokens=12, num_draft_tokens=3, seed=5))
    text = [17, 40, answer.token_ids[0]]
    for done in answer.rounds:
        ids = torch.tensor([text + list(done.drafted)])
        for model, noted in ((target, done.p_entropy), (draft.model, done.q_entropy)):
            laws = law(model(ids).logits)[0, len(text) - 1 : -1].double()
            expected = torch.distributions.Categorical(laws).entropy() if len(laws) else torch.zeros(0)
            assert list(noted) == pytest.approx(expected.tolist(), abs=1e-4)
        text += done.tokens
    greedy = generate_ids(target, draft, [17, 40], Settings(max_new_tokens=12))
    assert all(entropy == 0 for done in greedy.rounds for entropy in (*done.p_entropy, *done.q_entropy))
