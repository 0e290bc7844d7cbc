"""Randomness as an argument, so that a proof can put every outcome in its place (tests/enumeration.py)."""

from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """The two kinds of chance in speculative decoding."""

    def accept(self, prob: Tensor) -> Tensor:
        """One independent coin per element: True with the given probability. prob [B, K] -> bool [B, K]."""
        ...

    def choose(self, probs: Tensor) -> Tensor:
        """One token per row, drawn from that row's law. probs [B, V], not nec. normalised -> ids [B]."""
        ...


class SeededDraws:
    """Draws from a generator of its own: torch's global state is neither read nor changed."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def _uniform(self, *shape: int) -> Tensor:
        """In [0, 1), float64: never 1, so probability 1 always accepts; probability 0 never does."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64, device=self._generator.device)

    def accept(self, prob: Tensor) -> Tensor:
        return self._uniform(*prob.shape) < prob

    def choose(self, probs: Tensor) -> Tensor:
        """Inverse of the cumulative law. A token of probability 0 leaves no step in it and is never found."""
        cumulative = probs.double().cumsum(-1)
        total = cumulative[:, -1:]
        point = self._uniform(probs.shape[0], 1) * total
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, point, right=True).squeeze(-1)
