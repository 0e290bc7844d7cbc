"""The module that trains: draft, head and objective in one forward, which is what accelerate prepares.

Shapes: N supervised places, K unrolled steps, D hidden, V the target's vocabulary, V_d rows of the draft's head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distill.objectives import (
    Columns,
    Objective,
    at_least_float32,
    cached_columns,
    online_columns,
)
from distill.students import Student

Compare = Callable[[slice, Tensor], Columns]  # (which places, their q_logits [K, n, V_d])
ChunkLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor]]  # the same -> losses, and figures to be added up [..., n]


class DistillStep(nn.Module):
    """Summed objective over the supervised places of a micro-batch.

    A token drafted as number k + 1 of a round has the weight step_decay^k. Logits [N, V] exist only for `chunk_tokens`
    places at a time, for either model. `head_ids` [V_d] are the target's ids of the head's rows where it is trimmed.
    """

    def __init__(
        self, student: Student, loss_of: Objective, step_decay: float = 0.8, chunk_tokens: int = 128,
        head_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.student = student
        self.loss_of = loss_of
        self.step_decay = step_decay
        self.chunk_tokens = chunk_tokens
        self.head_ids = head_ids
        self.mean_alpha = [0.0] * student.steps
        # FSDP shares the draft's layers out one by one.
        self._no_split_modules = sorted({type(layer).__name__ for layer in student.layers})

    def learn(self, means: Sequence[float]) -> None:
        """Take note of the last optimiser step's mean figures: of them α, by unrolled step."""
        self.mean_alpha = list(means[: self.student.steps])

    @property
    def figures(self) -> list[str]:
        """Names of what `forward` adds up beside the loss."""
        numbers = range(1, self.student.steps + 1)
        return [*(f"alpha_{number}" for number in numbers), *(f"loss_{number}" for number in numbers)]

    def forward(
        self, signal: dict[str, Tensor], weights: Tensor | None = None, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The summed objective, weighted by step, and for each of `figures` [2 K, 2] its sum and the number of places.

        Args: `inputs` of the student; `signal` at the supervised places is the teacher's hidden [N, E] and head [V, E]
        (online), or top_ids, top_logp [N, k] and tail [N] of distill.logit_cache.Signal; weights [N], or None.
        """
        hidden, there = self.student(**inputs)
        compare = _compare_online(signal, self.head_ids) if "head" in signal else _compare_cached(signal)
        decay = torch.tensor([[self.step_decay**k] for k in range(len(hidden))], device=hidden.device)
        weight = there * decay if weights is None else there * decay * weights
        mean_alpha = torch.tensor(self.mean_alpha, device=hidden.device).unsqueeze(-1)

        def loss(places: slice, q_logits: Tensor) -> tuple[Tensor, Tensor]:
            columns = compare(places, q_logits)
            losses = self.loss_of(columns, mean_alpha)
            figures = torch.stack([columns.alpha(), losses.detach()]) * there[:, places]
            return losses * weight[:, places], figures

        head: Any = self.student.model.get_output_embeddings()
        total, figures = chunked_sum(loss, hidden, head.weight, self.chunk_tokens)
        counts = there.sum(-1).expand_as(figures)
        return total, torch.stack([figures, counts], dim=-1).flatten(0, 1)


def _compare_online(signal: dict[str, Tensor], head_ids: Tensor | None) -> Compare:
    """Against the teacher's logits, made chunk by chunk."""
    hidden, head = signal["hidden"], signal["head"]

    def compare(places: slice, q_logits: Tensor) -> Columns:
        with torch.no_grad():
            p_logits = hidden[places].to(head.dtype) @ head.T
        return online_columns(p_logits, q_logits, head_ids)

    return compare


def _compare_cached(signal: dict[str, Tensor]) -> Compare:
    return lambda places, q_logits: cached_columns(
        signal["top_ids"][places], signal["top_logp"][places], signal["tail"][places], q_logits
    )


def chunked_sum(loss: ChunkLoss, hidden: Tensor, head: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """The sum of `loss(slice(None), hidden @ head.T)[0]` with its gradients, and of its figures [...] without.

    hidden [K, N, D], head [V_d, D].
    """
    apply: Any = _ChunkedSum.apply
    return apply(loss, hidden, head, chunk_tokens)


class _ChunkedSum(torch.autograd.Function):
    """Takes each chunk's gradient while its logits exist, so that nothing is kept and nothing is made twice."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkLoss, hidden: Tensor, head: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        total = hidden.new_zeros((), dtype=torch.float32)
        figures: Tensor | float = 0.0
        hidden_grad = torch.empty_like(hidden)
        summed_in = torch.promote_types(head.dtype, torch.float32)
        head_grad = torch.zeros_like(head, dtype=summed_in) if head.requires_grad else None
        # Products in autocast's dtype where it is on, the loss at least in float32.
        product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        matrix = head.detach().to(product_dtype)
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden.shape[1], chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                inputs = hidden[:, chunk].to(product_dtype)
                q_logits = at_least_float32(inputs @ matrix.T).requires_grad_()
                with torch.enable_grad():
                    losses, of_chunk = loss(chunk, q_logits)
                    chunk_loss = losses.sum()
                (q_grad,) = torch.autograd.grad(chunk_loss, q_logits)
                q_grad = q_grad.to(product_dtype)
                hidden_grad[:, chunk] = (q_grad @ matrix).to(hidden.dtype)
                if head_grad is not None:
                    _add_product(head_grad, q_grad.flatten(0, 1).T, inputs.flatten(0, 1))
                total += chunk_loss.detach()
                figures = figures + of_chunk.detach().sum(-1)
        ctx.grads = hidden_grad, None if head_grad is None else head_grad.to(head.dtype)
        assert isinstance(figures, Tensor), "there is a supervised place"
        ctx.mark_non_differentiable(figures)
        return total, figures

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and given away: the head's gradient is large, and a step goes back only once.
        hidden_grad, head_grad = ctx.grads
        ctx.grads = None
        return None, hidden_grad.mul_(grad), None if head_grad is None else head_grad.mul_(grad), None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a matrix in between where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
