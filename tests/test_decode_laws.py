"""Temperature, top-k, top-p: transformers' own warpers are the reference."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from configs.errors import UserError
from decode.draws import SeededDraws
from decode.laws import Law
from decode.verify import overlap, verify_by_token


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 503, 600])
@pytest.mark.parametrize("top_p", [0.05, 0.8, 0.999, 1.0])
def test_the_law_equals_transformers_warpers(temperature, top_k, top_p):
    logits = 3 * torch.randn(5, 503, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    torch.testing.assert_close(Law(temperature, top_k, top_p)(logits), expected.softmax(-1))


def test_greedy_is_one_hot_at_the_lowest_of_equal_best_ids():
    probs = Law(0.0)(torch.tensor([[1.0, 3.0, 3.0, -torch.inf]]))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_logits_are_not_changed_and_half_precision_sums_to_one_in_float32():
    logits = torch.randn(2, 151_936).bfloat16()
    before = logits.clone()
    probs = Law(0.7, top_k=50, top_p=0.9)(logits)
    assert torch.equal(logits, before)
    assert probs.dtype == torch.float32
    assert (probs.sum(-1) - 1).abs().max() < 1e-5


def test_float64_logits_stay_float64():
    assert Law(1.0)(torch.randn(3, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_a_value_out_of_range_is_refused_by_name(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Law(**bad)


class FixedCoins(SeededDraws):
    """Every uniform number is the given one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def _uniform(self, *shape):
        return torch.full(shape, self.value, dtype=torch.float64)


def test_a_coin_of_zero_never_accepts_a_token_that_the_target_forbids():
    p = torch.tensor([[[0.0, 0.5, 0.5], [0.3, 0.3, 0.4]]])
    q = torch.tensor([[[0.9, 0.1, 0.0]]])
    accepted, token = verify_by_token(p, q, torch.tensor([[0]]), FixedCoins(0.0), 0)
    assert accepted.item() == 0
    assert token.item() == 1


def test_a_coin_just_below_one_accepts_a_certain_token():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    q = torch.tensor([[[0.5, 0.5]]])
    accepted, token = verify_by_token(p, q, torch.tensor([[1]]), FixedCoins(1 - 2**-53), 0)
    assert (accepted.item(), token.item()) == (1, 0)


@pytest.mark.parametrize("coin", [0.0, 0.5, 1 - 2**-53])
def test_choose_never_finds_a_token_of_probability_zero(coin):
    probs = torch.tensor([[[0.0, 0.25, 0.0, 0.75, 0.0]]])
    assert FixedCoins(coin).choose(probs, 0).item() in (1, 3)


def test_choose_follows_its_law():
    probs = torch.tensor([[[0.1, 0.0, 0.6, 0.3]]])
    draws = SeededDraws(0)
    counts = torch.bincount(torch.cat([draws.choose(probs, 0)[0] for _ in range(4000)]), minlength=4) / 4000
    assert (counts - probs[0, 0]).abs().max() < 0.03


def test_draws_leave_torchs_global_state_alone_and_a_seed_repeats():
    before = torch.random.get_rng_state()
    probs = torch.full((1, 20, 50), 0.02)
    first, second, other = (SeededDraws(seed).choose(probs, 0).tolist() for seed in (1, 1, 2))
    assert first == second
    assert first != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_full_block_takes_the_bonus_from_its_last_row_and_a_rejection_from_its_own():
    V, K = 6, 3
    p = torch.eye(V)[[0, 1, 2, 5]].unsqueeze(0)
    q = torch.full((1, K, V), 1 / V)
    for drafted, accepted, token in [([0, 1, 2], 3, 5), ([0, 1, 3], 2, 2), ([0, 4, 2], 1, 1), ([3, 1, 2], 0, 0)]:
        found = verify_by_token(p, q, torch.tensor([drafted]), FixedCoins(0.01), 0)
        assert (found[0].item(), found[1].item()) == (accepted, token)


def test_overlap_is_one_minus_total_variation():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    assert overlap(p, q).item() == pytest.approx(1 - 0.5 * (p - q).abs().sum().item())
