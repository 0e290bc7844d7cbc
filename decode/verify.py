"""Lossless verification of a drafted chain: pure tensor functions, chosen by name.

Shapes: B batch, K drafted tokens, V vocabulary. p is the target's law, q the draft's, after the same processors.
Every verifier takes p [B, K+1, V]; q [B, K, V], the very law that `drafted` [B, K] was drawn from; the draws; and the
absolute position of the first drafted token. It returns accepted [B] in 0..K and the next token [B]; K >= 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decode.draws import Draws

Verifier = Callable[[Tensor, Tensor, Tensor, Draws, int], tuple[Tensor, Tensor]]


def verify_by_token(p: Tensor, q: Tensor, drafted: Tensor, draws: Draws, position: int) -> tuple[Tensor, Tensor]:
    """Speculative sampling, token by token (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Accept drafted token x with probability min(1, p(x)/q(x)); at the first rejection choose from the residual
    (p - q)+ normalised, after K acceptances from p[:, K]. The tokens then follow p exactly.
    """
    accepted = draws.accept(_ratio(p, q, drafted).clamp(max=1)).long().cumprod(-1).sum(-1)
    weight = torch.ones_like(accepted, dtype=p.dtype)
    return accepted, _choose_after(accepted, weight, p, q, draws, position)


def verify_by_block(p: Tensor, q: Tensor, drafted: Tensor, draws: Draws, position: int) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al. 2025, algorithm 2): accepts at least as much as `token` on average.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), prefix i is accepted with probability
    h_i = R_i / (R_i + 1 - w_i), R_i = Σ_v (w_i p(v|x_≤i) - q(v|x_≤i))+, and h_K = w_K; the longest accepted prefix
    stands, also where a shorter one was rejected. The next token follows (w p - q)+ normalised, or p[:, K].
    """
    K = drafted.shape[1]
    if K == 1:  # h_1 = w_1: the token rule, with less work
        return verify_by_token(p, q, drafted, draws, position)
    weights = [torch.ones_like(drafted[:, 0], dtype=p.dtype)]
    for ratio in _ratio(p, q, drafted).unbind(-1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    w = torch.stack(weights, dim=1)  # [B, K+1]
    missing = (w[:, 1:K, None] * p[:, 1:K] - q[:, 1:]).clamp(min=0).sum(-1)  # R_i for i = 1..K-1
    inner = missing / (missing + 1 - w[:, 1:K])
    # 0/0: the whole prefix law is covered and nothing longer lacks mass.
    h = torch.cat([inner.nan_to_num(nan=1.0), w[:, K:]], dim=1)
    lengths = torch.arange(1, K + 1, device=p.device)
    accepted = (draws.accept(h).long() * lengths).amax(-1)
    return accepted, _choose_after(accepted, w.gather(1, accepted.unsqueeze(-1))[:, 0], p, q, draws, position)


def verify_by_match(p: Tensor, q: Tensor, drafted: Tensor, draws: Draws, position: int) -> tuple[Tensor, Tensor]:
    """Sample the target at every place and keep drafted tokens while they are what it chose.

    Needs no q, so it serves drafts that give none, and with `SharedNoise` it repeats plain decoding exactly.
    """
    chosen = draws.choose(p, position)
    accepted = (chosen[:, :-1] == drafted).long().cumprod(-1).sum(-1)
    return accepted, chosen.gather(1, accepted.unsqueeze(-1)).squeeze(-1)


DEFAULT_VERIFIER = "block"
VERIFIERS: dict[str, Verifier] = {"token": verify_by_token, "block": verify_by_block, "match": verify_by_match}


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """α = Σ_v min(p, q), the chance that one drafted token is accepted. p, q [..., V] -> [...]."""
    return p.minimum(q).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """-Σ_v p log p in nats. p [..., V] -> [...]."""
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)


def _ratio(p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """p(x)/q(x) of each drafted token. [B, K]."""
    rows = drafted.unsqueeze(-1)
    return p[:, : drafted.shape[1]].gather(-1, rows).squeeze(-1) / q.gather(-1, rows).squeeze(-1)


def _choose_after(accepted: Tensor, weight: Tensor, p: Tensor, q: Tensor, draws: Draws, position: int) -> Tensor:
    """The next token: from (weight·p - q)+ after `accepted` < K tokens, from p after all K. [B]."""
    K = q.shape[1]
    rows = torch.arange(len(accepted), device=p.device)
    p_next, q_next = p[rows, accepted], q[rows, accepted.clamp(max=K - 1)]  # [B, V]
    residual = (weight.unsqueeze(-1) * p_next - q_next).clamp(min=0)
    # After K acceptances there is no draft law left to subtract. An empty residual (p = q, and a rejection that only
    # rounding can cause) has nothing to choose from either: both fall back to p.
    use_p = (accepted.unsqueeze(-1) == K) | (residual.sum(-1, keepdim=True) == 0)
    return draws.choose(p_next.where(use_p, residual).unsqueeze(1), position).squeeze(-1)
