"""Losses against closed forms and float64."""

import math

import pytest
import torch

from distill.objectives import (
    NAMES,
    Columns,
    cached_columns,
    forward_kl,
    jensen_shannon,
    negative_log_alpha,
    objective,
    online_columns,
    reverse_kl,
    total_variation,
)


def test_forward_kl_of_two_tokens_in_closed_form():
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert forward_kl(p.log(), q.log()).item() == pytest.approx(expected, rel=1e-6)
    assert forward_kl(q.log(), p.log()).item() != pytest.approx(expected, rel=1e-2)  # it has a direction


def test_forward_kl_of_a_law_with_itself_is_zero():
    logits = 5 * torch.randn(7, 503)
    assert forward_kl(logits, logits).abs().max() == 0
    assert forward_kl(logits, logits + 3.0).abs().max() < 1e-5


def test_the_gradient_of_forward_kl_is_q_minus_p():
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(2, 3, 11, dtype=torch.float64).unbind()
    q_logits = q_logits.clone().requires_grad_()
    forward_kl(p_logits, q_logits).sum().backward()
    torch.testing.assert_close(q_logits.grad, q_logits.detach().softmax(-1) - p_logits.softmax(-1))


def test_forward_kl_takes_half_precision_logits_in_float32():
    p_logits, q_logits = torch.randn(2, 5, 49_152).bfloat16().unbind()
    found = forward_kl(p_logits, q_logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), forward_kl(p_logits.double(), q_logits.double()), rtol=1e-4, atol=1e-5)
    assert (found >= 0).all()


def test_a_token_that_the_target_forbids_adds_nothing():
    p_logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    q_logits = torch.zeros(1, 3, requires_grad=True)
    loss = forward_kl(p_logits, q_logits)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(1.5), rel=1e-6)
    torch.testing.assert_close(q_logits.grad, torch.tensor([[1 / 3 - 1 / 2, 1 / 3 - 1 / 2, 1 / 3]]))


def two_laws(V=11, N=3):
    p_logits, q_logits = torch.randn(2, N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(V)).unbind()
    return p_logits.log_softmax(-1), q_logits.clone().requires_grad_()


def gradient(loss, q_logits):
    return torch.autograd.grad(loss.sum(), q_logits, retain_graph=True)[0]


def test_reverse_kl_has_its_value_and_its_gradient_in_closed_form():
    log_p, q_logits = two_laws()
    log_q = q_logits.log_softmax(-1)
    q = log_q.exp()
    expected = (q * (log_q - log_p)).sum(-1)
    loss = reverse_kl(log_p, q_logits)
    torch.testing.assert_close(loss, expected)
    closed = q * (log_q - log_p - expected.unsqueeze(-1))
    torch.testing.assert_close(gradient(loss, q_logits), closed.detach())


def test_jensen_shannon_has_its_value_and_no_jump_of_scale_at_its_ends():
    log_p, q_logits = two_laws()
    p, q = log_p.exp(), q_logits.softmax(-1)
    m = 0.3 * p + 0.7 * q
    expected = 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(jensen_shannon(log_p, q_logits, 0.3), expected / (0.3 * 0.7))
    for beta, end in ((0.0, forward_kl), (1.0, reverse_kl)):
        near = abs(beta - 1e-5)
        torch.testing.assert_close(jensen_shannon(log_p, q_logits, near), end(log_p, q_logits), rtol=1e-3, atol=0)
        torch.testing.assert_close(jensen_shannon(log_p, q_logits, beta), end(log_p, q_logits))


def test_total_variation_and_negative_log_alpha_have_their_closed_forms():
    log_p, q_logits = two_laws()
    log_q, p = q_logits.log_softmax(-1), log_p.exp()
    q = log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    sign = (q - p).sign()
    tv_gradient = 0.5 * q * (sign - (q * sign).sum(-1, keepdim=True))
    loss = total_variation(log_p, log_q)
    torch.testing.assert_close(loss, 0.5 * (p - q).abs().sum(-1))
    torch.testing.assert_close(gradient(loss, q_logits), tv_gradient.detach())
    loss = negative_log_alpha(log_p, log_q)
    torch.testing.assert_close(loss, -alpha.log())
    torch.testing.assert_close(gradient(loss, q_logits), (tv_gradient / alpha.unsqueeze(-1)).detach())


def test_with_a_point_mass_negative_log_alpha_is_the_likelihood_and_does_not_starve():
    """49,152 ids, a uniform draft: the gradient of total variation is near zero, that of -log α as large as KL's."""
    V = 49_152
    log_p = torch.full((1, V), -torch.inf)
    log_p[0, 7] = 0.0
    q_logits = torch.zeros(1, V, requires_grad=True)
    log_q = q_logits.log_softmax(-1)
    assert negative_log_alpha(log_p, log_q).item() == pytest.approx(math.log(V), rel=1e-5)
    assert gradient(negative_log_alpha(log_p, log_q), q_logits).norm() == pytest.approx(1.0, rel=1e-3)
    assert gradient(total_variation(log_p, log_q), q_logits).norm() < 3e-5
    assert gradient(forward_kl(log_p, q_logits), q_logits).norm() == pytest.approx(1.0, rel=1e-3)


def test_overlap_objectives_take_the_original_law_and_kl_the_renormalised_one():
    """A head over three of five ids: α can be no more than their mass."""
    p_logits = torch.tensor([[2.0, 1.0, 0.0, 1.5, 0.5]], dtype=torch.float64)
    head = torch.tensor([0, 2, 4])
    p = p_logits.softmax(-1)[0, head]
    q_logits = p.log().unsqueeze(0)  # the best that the head can do
    columns = online_columns(p_logits, q_logits, head)
    assert columns.alpha().item() == pytest.approx(p.sum().item())
    assert total_variation(*columns.known()).item() == pytest.approx(1 - p.sum().item())
    assert forward_kl(columns.log_p, columns.log_q).abs().item() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_has_the_gradient_of_its_differences_in_float64(name):
    log_p, q_logits = two_laws(V=7, N=2)
    loss = objective(name)
    mean_alpha = torch.full((2,), 0.4, dtype=torch.float64)

    def of(logits):
        return loss(online_columns(log_p, logits, None), mean_alpha)

    assert torch.autograd.gradcheck(of, (q_logits,))


def test_hybrid_weighs_by_the_mean_alpha_of_the_step_before_which_is_a_constant():
    log_p, q_logits = two_laws()
    columns = online_columns(log_p, q_logits, None)
    kl, tv = forward_kl(*columns[:2]), total_variation(*columns[:2])
    for mean in (0.0, 0.3, 1.0):
        weight = math.exp(-3.0 * mean)
        found = objective("hybrid")(columns, torch.tensor(mean))
        torch.testing.assert_close(found, weight * kl + (1 - weight) * tv, rtol=1e-6, atol=1e-6)


def test_the_rest_of_a_cached_law_counts_for_kl_and_never_for_alpha():
    log_p = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64).log()
    log_q = torch.tensor([[0.1, 0.1, 0.8]], dtype=torch.float64).log()
    cached = Columns(log_p, log_q, rest=True)
    assert cached.alpha().item() == pytest.approx(0.2)
    assert total_variation(*cached.known()).item() == pytest.approx(0.8)
    top_ids, top_logp = torch.tensor([[0, 4]]), torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    q_logits = torch.tensor([[1.0, 2.0, 0.0, -1.0, 0.5]], dtype=torch.float64)
    found = cached_columns(top_ids, top_logp, torch.tensor([0.3], dtype=torch.float64), q_logits)
    q = q_logits.softmax(-1)[0]
    torch.testing.assert_close(found.log_q.exp()[0], torch.stack([q[0], q[4], q[1] + q[2] + q[3]]))
