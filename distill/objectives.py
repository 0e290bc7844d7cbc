"""What a draft is trained to minimise. p is the target's law, q the draft's."""

from torch import Tensor


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


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.element_size() >= 4 else logits.float()
