"""From logits to probabilities: the only place where temperature, top-k and top-p exist."""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import UserError


@dataclass(frozen=True)
class Law:
    """How the next token is chosen: temperature, then top-k, then top-p, in transformers' order.

    temperature 0 is greedy, top_k 0 and top_p 1.0 are off. The same law serves target and draft.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities of the next token.

        Args: logits [..., V], any float dtype; they are not changed.
        Returns: [..., V] in float32, or float64 for float64 logits; greedy is one-hot at the lowest best id.
        """
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.is_greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            lowest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
        if self.top_p < 1:
            logits = logits.masked_fill(_outside_nucleus(logits, self.top_p), -torch.inf)
        return logits.softmax(-1)


def _outside_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """True for tokens outside the smallest set of most likely tokens whose mass reaches `top_p`."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    outside = mass_before >= top_p
    outside[..., 0] = False
    return torch.zeros_like(outside).scatter_(-1, order, outside)
