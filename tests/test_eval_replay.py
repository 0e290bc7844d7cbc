"""Replay: exact on table models by enumeration, and equal to what the decoder counts."""

import pytest
import torch
from enumeration import exact_law
from tables import random_table

from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.length import Costs
from decode.verify import VERIFIERS
from eval.predict import best_length, predict
from eval.replay import Drafted, Replay, alpha, expected_rounds, kept_chances, positions, replay_text, tau
from eval.stats import Timed, speedup, speedup_interval

V, PROMPT, TOKENS = 3, [1, 2], 4


def constant(acceptance: float, length: int, ended: bool = False) -> Replay:
    return Replay([Drafted([acceptance] * length, [acceptance] * length, [acceptance] * length)], ended)


def text_laws(model, text, law):
    whole = [*PROMPT, *text]
    return torch.stack([law(model.table[whole[i - 2], whole[i - 1]]) for i in range(len(PROMPT), len(whole))])


@pytest.mark.parametrize("law", [Law(1.0), Law(0.7, top_k=2), Law(0.0)], ids=str)
@pytest.mark.parametrize(
    ("verifier", "num_draft_tokens"),
    [("token", 1), ("token", 2), ("block", 2), ("match", 1)],
)
def test_expected_rounds_given_a_text_equal_the_decoders_by_enumeration(law, verifier, num_draft_tokens):
    """Every branch of real decoding, grouped by the text it emitted: mean number of rounds per text."""
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    tokens = 3 if verifier == "match" else TOKENS
    settings = Settings(law, tokens, num_draft_tokens, verifier=verifier)

    def outcome(draws):
        answer = generate_ids(target, LMDraft(draft), PROMPT, settings, draws=draws)
        return (*answer.token_ids, len(answer.rounds))

    by_text: dict[tuple[int, ...], list[float]] = {}
    for (*text, rounds), probability in exact_law(outcome).items():
        sums = by_text.setdefault(tuple(text), [0.0, 0.0])
        sums[0] += probability
        sums[1] += probability * rounds
    assert by_text
    for text, (probability, weighted_rounds) in by_text.items():
        replay = replay_text(text_laws(target, text, law), [text_laws(draft, text, law)], torch.tensor(text))
        expected = sum(expected_rounds(replay, num_draft_tokens, verifier))
        assert expected == pytest.approx(weighted_rounds / probability, abs=1e-9)


def test_a_perfect_draft_and_a_hopeless_one():
    for verifier in VERIFIERS:
        perfect, hopeless = constant(1.0, 12), constant(0.0, 12)
        assert tau([perfect], 3, verifier) == 4.0
        assert tau([hopeless], 3, verifier) == 1.0
        assert alpha([perfect, hopeless]) == 0.5
        assert positions([perfect], 3, verifier) == ([1.0] * 3, [1.0] * 3)
        assert positions([hopeless], 2, verifier) == ([0.0, 0.0], [0.0, 0.0])


def test_constant_acceptance_gives_leviathans_formula_on_a_long_text():
    a, gamma = 0.6, 4
    text = constant(a, 20_000)
    assert tau([text], gamma, "token") == pytest.approx((1 - a ** (gamma + 1)) / (1 - a), rel=1e-3)
    conditional, joint = positions([text], gamma, "token")
    assert conditional == pytest.approx([a] * gamma)
    assert joint == pytest.approx([a**j for j in range(1, gamma + 1)])


def test_an_empty_text_has_no_rounds():
    assert expected_rounds(constant(1.0, 0), 3, "block") == []
    assert tau([constant(1.0, 0)], 3, "block") == 1.0


def test_a_token_that_the_target_law_no_longer_allows_follows_the_draft():
    p, q = torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    replay = replay_text(p, [q], torch.tensor([0, 1, 1]))
    assert kept_chances(replay, 0, 2, "token") == [1.0, 1.0, 0.0]


def test_the_prediction_divides_tau_by_the_cost_of_a_round():
    text = constant(0.5, 1000)
    found = predict([text], Costs(c=0.1, o=0.05, v={1: 1.0, 2: 1.1, 3: 1.5}), "token")
    assert [p.num_draft_tokens for p in found] == [1, 2]
    assert found[0].speedup == pytest.approx(found[0].tau / (0.1 + 1.1 + 0.05))
    assert found[1].speedup == pytest.approx(found[1].tau / (0.2 + 1.5 + 0.05))
    assert best_length(found) == 1


def test_speedup_is_a_ratio_of_sums_and_its_interval_is_paired():
    plain = [Timed(2.0 * k, 10 * k) for k in (1, 2, 3, 4, 5)]
    twice_as_fast = [Timed(1.0 * k, 10 * k) for k in (1, 2, 3, 4, 5)]
    assert speedup(plain, twice_as_fast) == 2.0
    low, high = speedup_interval(plain, twice_as_fast)
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(2.0)  # pairs always agree, however the prompts differ
    mixed = [Timed(1.0, 10), Timed(8.0, 20), Timed(3.0, 30), Timed(8.0, 40), Timed(10.0, 50)]
    low, high = speedup_interval(plain, mixed)
    assert speedup(plain, mixed) == pytest.approx(1.0)
    assert low < 1.0 < high
    assert speedup_interval(plain, mixed) == (low, high)


def test_answers_of_other_lengths_are_compared_per_token():
    assert speedup([Timed(1.0, 10)], [Timed(1.0, 20)]) == 2.0


def test_too_few_prompts_have_no_interval_and_prompts_without_decoding_do_not_count():
    one = [Timed(1.0, 10)]
    assert speedup_interval(one * 4, one * 4) is None
    assert speedup_interval([*one * 4, Timed(0.0, 0)], one * 5) is None
    low, high = speedup_interval([*one * 5, Timed(0.0, 0)], [*one * 5, Timed(0.0, 0)])
    assert low == high == 1.0


def test_a_round_drafts_past_an_end_token_but_never_the_last_token_of_a_limit():
    limit, end = constant(1.0, 3), constant(1.0, 3, ended=True)
    assert positions([limit], 3, "token")[1] == [1.0, 1.0, 0.0]
    assert positions([end], 3, "token")[1] == [1.0, 1.0, 1.0]
    assert positions([constant(1.0, 2, ended=True)], 3, "token")[1] == [1.0, 1.0, 0.0]
