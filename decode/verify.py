"""Lossless verification of a drafted chain: pure tensor functions.

Shapes: B batch, K drafted tokens, V vocabulary. p is the target's law, q the draft's, after the same processors.
"""

from torch import Tensor

from decode.draws import Draws


def verify_by_token(p: Tensor, q: Tensor, drafted: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Speculative sampling, token by token (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Accept drafted token x with probability min(1, p(x)/q(x)); at the first rejection choose from the residual
    (p - q)+ normalised, after K acceptances from p[:, K]. The tokens then follow p exactly.

    Args: p [B, K+1, V]; q [B, K, V], the very law that `drafted` [B, K] was drawn from. K may be 0.
    Returns: accepted [B] in 0..K, and the next token [B].
    """
    K = drafted.shape[1]
    rows = drafted.unsqueeze(-1)
    p_drafted, q_drafted = p[:, :K].gather(-1, rows).squeeze(-1), q.gather(-1, rows).squeeze(-1)
    accepted = draws.accept((p_drafted / q_drafted).clamp(max=1)).long().cumprod(-1).sum(-1)

    at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[-1])
    p_next = p.gather(1, at).squeeze(1)
    if K == 0:
        return accepted, draws.choose(p_next)
    residual = (p_next - q.gather(1, at.clamp(max=K - 1)).squeeze(1)).clamp(min=0)
    # After K acceptances there is no draft law left to subtract. An empty residual (p = q, and a rejection that
    # only rounding can cause) has nothing to choose from either: both fall back to p.
    use_p = (accepted == K) | (residual.sum(-1) == 0)
    return accepted, draws.choose(p_next.where(use_p.unsqueeze(-1), residual))


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """α = Σ_v min(p, q), the chance that one drafted token is accepted. p, q [..., V] -> [...]."""
    return p.minimum(q).sum(-1)
