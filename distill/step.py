"""The module that trains: draft, head and objective in one forward, which is what accelerate prepares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distill.objectives import top_forward_kl
from distill.teacher import last_hidden

Objective = Callable[[Tensor, Tensor], Tensor]
ChunkLoss = Callable[[slice, Tensor], Tensor]  # (which tokens, their q_logits [n, V]) -> [n]


class DistillStep(nn.Module):
    """Summed objective over the supervised positions of a micro-batch.

    Logits [N, V] exist only for `chunk_tokens` positions at a time, for either model.
    """

    def __init__(self, draft: nn.Module, objective: Objective, chunk_tokens: int = 128) -> None:
        super().__init__()
        self.draft = draft
        self.objective = objective
        self.chunk_tokens = chunk_tokens

    def forward(
        self, ids: Tensor, predicts: Tensor, teacher_hidden: Tensor | None = None, teacher_head: Tensor | None = None,
        positions: Tensor | None = None, top_ids: Tensor | None = None, top_logp: Tensor | None = None,
        tail: Tensor | None = None, weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The summed objective: online against teacher_hidden @ teacher_head.T, else against cached probabilities.

        Args: ids, predicts, positions [B, T] (distill.batches.Batch); at the supervised positions teacher_hidden
        [N, D] with teacher_head [V, D], or top_ids, top_logp [N, k] and tail [N] (distill.logit_cache.Signal);
        weights [N] of the tokens, or None.
        """
        hidden = last_hidden(self.draft, ids, positions)[predicts]
        head: Any = self.draft.get_output_embeddings()  # type: ignore[operator]
        if teacher_hidden is not None and teacher_head is not None:
            loss = online_loss(self.objective, teacher_hidden, teacher_head)
        elif top_ids is not None and top_logp is not None and tail is not None:
            loss = cached_loss(top_ids, top_logp, tail)
        else:
            raise ValueError("no teacher signal: give teacher_hidden and teacher_head, or top_ids, top_logp and tail")
        if weights is not None:
            loss = weighted(loss, weights)
        return chunked_sum(loss, hidden, head.weight, self.chunk_tokens)


def weighted(loss: ChunkLoss, weights: Tensor) -> ChunkLoss:
    """Each token's loss times its weight [N]."""
    return lambda chunk, q_logits: loss(chunk, q_logits) * weights[chunk]


def online_loss(objective: Objective, teacher_hidden: Tensor, teacher_head: Tensor) -> ChunkLoss:
    """The objective against the teacher's logits, made chunk by chunk. teacher_hidden [N, E]; teacher_head [V, E]."""

    def loss(chunk: slice, q_logits: Tensor) -> Tensor:
        with torch.no_grad():
            p_logits = teacher_hidden[chunk].to(teacher_head.dtype) @ teacher_head.T
        return objective(p_logits, q_logits)

    return loss


def cached_loss(top_ids: Tensor, top_logp: Tensor, tail: Tensor) -> ChunkLoss:
    """`top_forward_kl` against cached probabilities. top_ids, top_logp [N, k]; tail [N]."""
    return lambda chunk, q_logits: top_forward_kl(top_ids[chunk], top_logp[chunk], tail[chunk], q_logits)


def chunked_sum(loss: ChunkLoss, hidden: Tensor, head: Tensor, chunk_tokens: int) -> Tensor:
    """Equals `loss(slice(None), hidden @ head.T).sum()`, with the same gradients. hidden [N, D], head [V, D]."""
    apply: Any = _ChunkedSum.apply
    return apply(loss, hidden, head, chunk_tokens)


class _ChunkedSum(torch.autograd.Function):
    """Takes each chunk's gradient while its logits exist, so that nothing is kept and nothing is made twice."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkLoss, hidden: Tensor, head: Tensor, chunk_tokens: int) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad, head_grad = torch.empty_like(hidden), torch.zeros_like(head)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                inputs = hidden[chunk].to(head.dtype)  # under autocast the body gives half precision
                q_logits = (inputs @ head.T).requires_grad_()
                with torch.enable_grad():
                    chunk_loss = loss(chunk, q_logits).sum()
                (q_grad,) = torch.autograd.grad(chunk_loss, q_logits)
                hidden_grad[chunk] = (q_grad @ head).to(hidden.dtype)
                head_grad.addmm_(q_grad.T, inputs)
                total += chunk_loss.detach()
        ctx.save_for_backward(hidden_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return None, grad * hidden_grad, grad * head_grad, None
