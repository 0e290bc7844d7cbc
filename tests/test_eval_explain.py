"""What a prediction is made of, and why a measurement missed it: closed forms, and counts by hand."""

import pytest
from conftest import make_llama

from decode.length import Costs
from decode.trace import Round, Tally
from distill.build import build_eagle3_draft, build_lm_draft
from eval.footprint import flop_per_token, footprint, kv_bytes_per_token
from eval.gap import explain
from eval.predict import break_even, oracle, predict
from eval.replay import Drafted, Replay, tau


def constant(chance, tokens):
    """A text at each place of which a drafted token is kept with this chance."""
    return Replay([Drafted([chance] * tokens, [chance] * tokens, [chance] * tokens)])


def round_of(drafted, accepted, own, draft_s, verify_s, round_s):
    emitted = tuple(range(accepted + own))
    return Round(tuple(range(drafted)), accepted, emitted, *[(0.5,) * drafted] * 5, draft_s, 0.0, verify_s, round_s)


def test_break_even_acceptance_pays_for_exactly_the_cost_of_a_round():
    assert break_even(1, 1.25) == pytest.approx(0.25, abs=1e-5)  # 1 + a = c + v(2) + o
    a = break_even(3, 1.8)
    assert 1 + a + a**2 + a**3 == pytest.approx(1.8, abs=1e-4)
    assert break_even(2, 3.5) is None
    assert break_even(2, 0.9) == 0.0


def test_the_oracle_drafts_for_nothing_and_is_always_right_up_to_the_end_of_a_text():
    costs = Costs(c=0.3, o=0.1, v={1: 1.0, 2: 1.2, 3: 1.4})
    # Ten tokens: 5 rounds of 2 at γ = 1, 4 rounds of up to 3 at γ = 2.
    best = oracle([constant(0.2, 10)], costs)
    assert (best.num_draft_tokens, best.speedup) == (2, pytest.approx(10 / 4 / 1.5))


def test_a_prediction_has_the_interval_of_its_texts():
    costs = Costs(c=0.1, o=0.0, v={1: 1.0, 2: 1.1})
    alike = predict([constant(0.5, 40)] * 8, costs, "token")[0]
    assert alike.speedup_ci == pytest.approx((alike.speedup, alike.speedup))
    mixed = predict([constant(0.1, 40), constant(0.9, 40)] * 4, costs, "token")[0]
    assert mixed.speedup_ci[0] < mixed.speedup < mixed.speedup_ci[1]


def test_the_factors_of_a_gap_multiply_to_measured_over_predicted():
    texts, costs = [constant(0.4, 50)], Costs(c=0.1, o=0.05, v={1: 1.0, 2: 1.1, 3: 1.2})
    predicted = predict(texts, costs, "token")[1].speedup
    rounds = [round_of(2, 1, 1, 0.3, 1.3, 1.65), round_of(2, 2, 1, 0.25, 1.2, 1.5), round_of(2, 1, 0, 0.2, 1.2, 1.5)]
    gap = explain(predicted, 1.2, rounds, texts, 2, "token", costs, plain_step_s=1.0)
    product = gap.acceptance * gap.truncation * gap.draft * gap.verify * gap.overhead * gap.rest
    assert product == pytest.approx(1.2 / predicted)
    assert gap.draft < 1 < gap.acceptance  # drafting took longer than foreseen, and more was kept


def test_a_run_that_went_as_foreseen_has_no_gap():
    """Every drafted token kept: rounds of two tokens, each at its foreseen cost."""
    texts, costs = [constant(1.0, 8)], Costs(c=0.25, o=0.125, v={1: 1.0, 2: 1.125})
    assert tau(texts, 1, "token") == 2
    rounds = [round_of(1, 1, 1, 0.25, 1.125, 1.5)] * 4
    gap = explain(2 / 1.5, 2 / 1.5, rounds, texts, 1, "token", costs, plain_step_s=1.0)
    factors = [gap.acceptance, gap.truncation, gap.draft, gap.verify, gap.overhead, gap.rest]
    assert factors == pytest.approx([1.0] * 6)


def test_a_text_that_ends_at_the_limit_leaves_no_gap_in_acceptance():
    """Nine tokens in rounds of two: the last one is a plain step, since a limit's last token is never drafted."""
    texts, costs = [constant(1.0, 9)], Costs(c=0.25, o=0.125, v={1: 1.0, 2: 1.125})
    rounds = [*[round_of(1, 1, 1, 0.25, 1.125, 1.5)] * 4, round_of(0, 0, 1, 0.0, 1.0, 1.1)]
    gap = explain(1.2, 1.2, rounds, texts, 1, "token", costs, plain_step_s=1.0)
    assert (gap.acceptance, gap.truncation) == (pytest.approx(1.0), pytest.approx(1.0))


def test_memory_and_arithmetic_counted_by_hand():
    target = make_llama(vocabulary=120, layers=3, seed=0)
    config = target.config
    D, M, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    layer = 2 * D * config.num_attention_heads * config.head_dim + 2 * D * kv + 3 * D * M
    assert flop_per_token(target) == 2 * (3 * layer + 120 * D)  # the embedding is looked up, the head multiplied with
    assert kv_bytes_per_token(target) == 2 * 3 * kv * 4
    draft = build_lm_draft(target, (0,))
    assert flop_per_token(draft) == 2 * (layer + 120 * D)
    found = footprint(target, draft, Tally(rounds=10, drafted=20, accepted=8, emitted=18), rereads=False)
    expected = (30 * flop_per_token(target) + 20 * flop_per_token(draft)) / 18 / 1e9
    assert found.speculative_gflop_per_token == pytest.approx(expected)
    assert found.draft_gib == pytest.approx(sum(w.numel() for w in draft.parameters()) * 4 / 2**30)


def test_a_feature_draft_has_one_layer_of_keys_and_no_embeddings():
    target = make_llama(vocabulary=120, layers=3, seed=0)
    draft = build_eagle3_draft(target, (1, 2, 3), None, seed=0)
    assert kv_bytes_per_token(draft) * 3 == kv_bytes_per_token(target)
    assert flop_per_token(draft) == 2 * sum(w.numel() for w in draft.parameters() if w.ndim == 2)
