"""What a draft is trained to minimise. p is the target's law, q the draft's.

Shapes: N places; C columns, each an id of the draft's head. The Kullback-Leibler family takes logits, or
log-probabilities that need not sum to one: p is renormalised over the columns. Total variation and α take the
target's original law: what p has outside the columns is lost to the draft.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


def forward_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p ‖ q) per place, in float32 (float64 for float64 logits).

    Equals, for each row::

        p = p_logits.softmax(-1)
        (p * (p_logits.log_softmax(-1) - q_logits.log_softmax(-1))).sum(-1)

    Args: p_logits, q_logits [N, C], any float dtype. Returns: [N]; 0 where both laws are equal. A column with p = 0
    adds nothing. The gradient with respect to q_logits is q - p (DistillSpec, Zhou et al. 2024, table 1).
    """
    log_p, log_q = _log_laws(p_logits, q_logits)
    return _mean_difference(log_p, log_p, log_q)


def reverse_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(q ‖ p) per place. Equals `forward_kl(q_logits, p_logits)`; its gradient is q (log(q/p) - KL(q ‖ p)).

    Infinite where p is 0 and q is not: give it a law without top-k or top-p.
    """
    log_p, log_q = _log_laws(p_logits, q_logits)
    return _mean_difference(log_q, log_q, log_p)


def jensen_shannon(p_logits: Tensor, q_logits: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, eq. 1), divided by β (1 - β).

    Equals, for each row, with m = β p + (1 - β) q::

        (beta * KL(p, m) + (1 - beta) * KL(q, m)) / (beta * (1 - beta))

    So its scale does not depend on β, and the ends are the limits: `forward_kl` for 0 and `reverse_kl` for 1.
    """
    if beta in (0.0, 1.0):
        return reverse_kl(p_logits, q_logits) if beta else forward_kl(p_logits, q_logits)
    log_p, log_q = _log_laws(p_logits, q_logits)
    b = torch.tensor(beta, dtype=log_p.dtype, device=log_p.device)
    neither = log_p.isneginf() & log_q.isneginf()  # of two such the sum has no gradient
    parts = (log_p + b.log(), log_q + (1 - b).log())
    log_m = torch.logaddexp(*(part.masked_fill(neither, 0.0) for part in parts)).masked_fill(neither, -torch.inf)
    return _mean_difference(log_p, log_p, log_m) / (1 - beta) + _mean_difference(log_q, log_q, log_m) / beta


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - α per place. Equals `1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)`.

    Args: log-probabilities [N, C] in float32 or more; those of p may sum to less than one. The gradient with respect
    to q's logits is q (s - E_q s) / 2 with s = sign(q - p) where both are over the same ids, and vanishes with q.
    """
    return 1 - torch.minimum(log_p, log_q).exp().sum(-1)


def negative_log_alpha(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log α per place, in log space. Equals `-torch.minimum(log_p.exp(), log_q.exp()).sum(-1).log()`.

    Args as for `total_variation`. The gradient is that of 1 - α divided by α, so it does not vanish where α is small
    (LK losses 2026, eq. 6). 0 at a place where p has nothing in the columns: it teaches nothing.
    """
    nothing = log_p.isneginf().all(-1)
    both = torch.minimum(log_p, log_q).masked_fill(nothing.unsqueeze(-1), 0.0)
    return (-both.logsumexp(-1)).masked_fill(nothing, 0.0)


class Columns(NamedTuple):
    """What is compared at N places: log_p of the target's original law and log_q, each [N, C].

    With `rest`, only the likeliest ids of p are known; the last column is all other ids of the head together.
    """

    log_p: Tensor
    log_q: Tensor
    rest: bool

    def known(self) -> tuple[Tensor, Tensor]:
        """The columns that are one id each."""
        return (self.log_p[..., :-1], self.log_q[..., :-1]) if self.rest else (self.log_p, self.log_q)

    def alpha(self) -> Tensor:
        """Σ min(p, q) over the known ids [N]; with `rest` a lower bound, short by at most the rest's mass."""
        return torch.minimum(*self.known()).exp().sum(-1)


Loss = Callable[[Tensor, Tensor], Tensor]  # of two laws, per place
Objective = Callable[[Columns, Tensor], Tensor]  # (columns, mean α at each place's unrolled step [N]) -> [N]
NAMES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_alpha", "hybrid")


def objective(name: str, beta: float = 0.5, eta: float = 3.0) -> Objective:
    """The loss per place [N] of `Columns`, by one of NAMES; `beta` is jensen_shannon's.

    hybrid is λ·forward_kl + (1 - λ)·total_variation with λ = exp(-eta · mean α) (LK losses 2026, eq. 9). The mean α is
    that of the optimiser step before, a constant to the gradient.
    """
    of_laws: dict[str, Loss] = {
        "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jensen_shannon": partial(jensen_shannon, beta=beta),
    }  # fmt: skip
    of_overlap: dict[str, Loss] = {
        "total_variation": total_variation,
        "negative_log_alpha": negative_log_alpha,
    }

    def loss(columns: Columns, mean_alpha: Tensor) -> Tensor:
        if name in of_laws:
            return of_laws[name](columns.log_p, columns.log_q)
        if name in of_overlap:
            return of_overlap[name](*columns.known())
        weight = (-eta * mean_alpha).exp()
        divergence = forward_kl(columns.log_p, columns.log_q)
        return weight * divergence + (1 - weight) * total_variation(*columns.known())

    return loss


def online_columns(p_logits: Tensor, q_logits: Tensor, head_ids: Tensor | None) -> Columns:
    """All of the head: p_logits [N, V] over the target's ids, q_logits [..., N, V_d] over the head's `head_ids`."""
    log_p = at_least_float32(p_logits).log_softmax(-1)
    log_p = log_p[..., : q_logits.shape[-1]] if head_ids is None else log_p[..., head_ids]
    return Columns(log_p, at_least_float32(q_logits).log_softmax(-1), rest=False)


def cached_columns(top_ids: Tensor, top_logp: Tensor, tail: Tensor, q_logits: Tensor) -> Columns:
    """The likeliest ids of p and the rest: top_ids, top_logp [N, k], tail [N], as in distill.logit_cache.Signal.

    q_logits [..., N, V_d]. An id of V_d or more is none of the head's, and its top_logp is -inf.
    """
    top_ids = top_ids.expand(*q_logits.shape[:-1], -1)
    q_logits = nn.functional.pad(at_least_float32(q_logits), (0, 1), value=-torch.inf)
    normaliser = q_logits.logsumexp(-1, keepdim=True)
    q_rest = q_logits.scatter(-1, top_ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_q = torch.cat([q_logits.gather(-1, top_ids), q_rest], dim=-1) - normaliser
    return Columns(torch.cat([top_logp, tail.log().unsqueeze(-1)], dim=-1), log_q, rest=True)


def at_least_float32(logits: Tensor) -> Tensor:
    """Half precision loses small overlaps."""
    return logits if logits.element_size() >= 4 else logits.float()


def _log_laws(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the same columns, each summing to one; all -inf where p has nothing."""
    log_p = at_least_float32(p_logits).log_softmax(-1)
    nothing = p_logits.isneginf().all(-1, keepdim=True)
    return log_p.masked_fill(nothing, -torch.inf), at_least_float32(q_logits).log_softmax(-1)


def _mean_difference(log_of: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ of · (log a - log b), where 0 · anything is 0."""
    # Only where the weight is 0, so that a draft whose logits are not finite shows as a loss that is not; and before
    # the product, whose gradient would be 0 · (inf - inf) there.
    of = log_of.exp()
    return (of * (log_a - log_b).masked_fill(of == 0, 0.0)).sum(-1)
