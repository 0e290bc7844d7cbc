"""The module that trains: draft, head and objective in one forward, which is what accelerate prepares."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distill.teacher import last_hidden

Objective = Callable[[Tensor, Tensor], Tensor]


class DistillStep(nn.Module):
    """Summed objective over the supervised positions of a micro-batch.

    Logits [N, V] exist only for `chunk_tokens` positions at a time, for either model.
    """

    def __init__(self, draft: nn.Module, objective: Objective, chunk_tokens: int = 128) -> None:
        super().__init__()
        self.draft = draft
        self.objective = objective
        self.chunk_tokens = chunk_tokens

    def forward(self, ids: Tensor, predicts: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
        """ids, predicts [B, T]; teacher_hidden [N, D] at the supervised positions; teacher_head [V, D] -> scalar."""
        hidden = last_hidden(self.draft, ids)[predicts]
        head: Any = self.draft.get_output_embeddings()  # type: ignore[operator]
        return chunked_objective(self.objective, hidden, head.weight, teacher_hidden, teacher_head, self.chunk_tokens)


def chunked_objective(
    objective: Objective, hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, chunk_tokens: int
) -> Tensor:  # fmt: skip
    """Equals `objective(teacher_hidden @ teacher_head.T, hidden @ head.T).sum()`, with the same gradients.

    hidden [N, D], head [V, D], teacher_hidden [N, E], teacher_head [V, E] -> scalar.
    """
    apply: Any = _ChunkedObjective.apply
    return apply(objective, hidden, head, teacher_hidden, teacher_head, chunk_tokens)


class _ChunkedObjective(torch.autograd.Function):
    """Takes each chunk's gradient while its logits exist, so that nothing is kept and nothing is made twice."""

    @staticmethod
    def forward(
        ctx: Any, objective: Objective, hidden: Tensor, head: Tensor,
        teacher_hidden: Tensor, teacher_head: Tensor, chunk_tokens: int,
    ) -> Tensor:  # fmt: skip
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_grad, head_grad = torch.empty_like(hidden), torch.zeros_like(head)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                inputs = hidden[chunk].to(head.dtype)  # under autocast the body gives half precision
                p_logits = teacher_hidden[chunk].to(teacher_head.dtype) @ teacher_head.T
                q_logits = (inputs @ head.T).requires_grad_()
                with torch.enable_grad():
                    loss = objective(p_logits, q_logits).sum()
                (q_grad,) = torch.autograd.grad(loss, q_logits)
                hidden_grad[chunk] = (q_grad @ head).to(hidden.dtype)
                head_grad.addmm_(q_grad.T, inputs)
                total += loss.detach()
        ctx.save_for_backward(hidden_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return None, grad * hidden_grad, grad * head_grad, None, None, None
