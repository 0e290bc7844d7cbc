"""What a draft is trained to minimise. p is the target's law, q the draft's."""

import torch
from torch import Tensor, nn


def forward_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p ‖ q) per token, in float32 (float64 for float64 logits).

    Equals, for each row::

        p = p_logits.softmax(-1)
        (p * (p_logits.log_softmax(-1) - q_logits.log_softmax(-1))).sum(-1)

    Args: p_logits, q_logits [N, V], any float dtype. Returns: [N]; 0 where both laws are equal. A token with p = 0
    adds nothing. The gradient with respect to q_logits is q - p (DistillSpec, Zhou et al. 2024, table 1).
    """
    log_p = _at_least_float32(p_logits).log_softmax(-1)
    log_q = _at_least_float32(q_logits).log_softmax(-1)
    p = log_p.exp()
    # Only where p is 0, so that a draft whose logits are not finite shows as a loss that is not.
    return (p * (log_p - log_q)).masked_fill(p == 0, 0.0).sum(-1)


def top_forward_kl(top_ids: Tensor, top_logp: Tensor, tail: Tensor, q_logits: Tensor) -> Tensor:
    """KL of p against q with all ids but the top ones taken as one, per token: a lower bound of `forward_kl`.

    Equals, for each row, with the true probabilities p of the top ids and the rest of the mass in the tail::

        p, q = top_logp.exp(), q_logits.softmax(-1)
        q_top = q[top_ids]
        (p * (p / q_top).log()).sum() + tail * (tail / (1 - q_top.sum())).log()

    Args: top_ids, top_logp [N, k]; tail [N]; q_logits [N, V]. An id of V or more is none of q's, and its top_logp is
    -inf. Returns: [N]. The gradient is q - p at the top ids and q (1 - tail / q_tail) elsewhere; it differs from that
    of the whole law only by how the tail's mass lies inside the tail.
    """
    q_logits = nn.functional.pad(_at_least_float32(q_logits), (0, 1), value=-torch.inf)
    normaliser = q_logits.logsumexp(-1)
    log_q = q_logits.gather(-1, top_ids) - normaliser.unsqueeze(-1)
    log_q_tail = q_logits.scatter(-1, top_ids, -torch.inf).logsumexp(-1) - normaliser
    p = top_logp.exp()
    top = (p * (top_logp - log_q)).masked_fill(p == 0, 0.0).sum(-1)
    rest = (tail * (tail.log() - log_q_tail)).masked_fill(tail == 0, 0.0)
    return top + rest


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.element_size() >= 4 else logits.float()
