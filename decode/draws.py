"""Randomness as an argument, so that a proof can put every outcome in its place (tests/enumeration.py)."""

from typing import Protocol

import torch
from torch import Tensor


class Draws(Protocol):
    """The two kinds of chance in speculative decoding."""

    def accept(self, prob: Tensor) -> Tensor:
        """One independent coin per element: True with the given probability. prob [B, K] -> bool [B, K]."""
        ...

    def choose(self, probs: Tensor, position: int) -> Tensor:
        """One token per row, drawn from that row's law (its sum need not be 1). probs [B, N, V] -> ids [B, N].

        `position` is the absolute place of the first row's token in the text; row i chooses for `position` + i.
        """
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

    def choose(self, probs: Tensor, position: int) -> Tensor:
        """Inverse of the cumulative law. A token of probability 0 leaves no step in it and is never found."""
        cumulative = probs.double().cumsum(-1)
        total = cumulative[..., -1:]
        point = self._uniform(*probs.shape[:-1], 1) * total
        point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


class SharedNoise:
    """Gumbel noise that belongs to the place in the text, not to the call: argmax(log p + noise) follows p.

    Whoever chooses for a place uses the same noise, keyed by (seed, absolute position, token id): the draft, the
    target that verifies, and plain decoding. With the `match` verifier a sampled speculative run then equals the
    sampled plain run token for token (Daliri, Musco and Suresh 2024, arXiv 2408.07978).
    """

    KEPT = 64  # places whose noise is remembered; a round looks at far fewer

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed, self._device = seed, device
        self._noise: dict[int, Tensor] = {}

    def accept(self, prob: Tensor) -> Tensor:
        raise NotImplementedError("shared noise has no coins: verify by match")

    def choose(self, probs: Tensor, position: int) -> Tensor:
        return self.scores(probs, position).argmax(-1)

    def scores(self, probs: Tensor, position: int) -> Tensor:
        """log p + noise [..., N, V] of N places from `position` on, whose largest is chosen."""
        vocabulary, places = probs.shape[-1], range(position, position + probs.shape[-2])
        noise = torch.stack([self._gumbel(place, vocabulary) for place in places])
        return probs.log() + noise.to(probs.dtype)

    def _gumbel(self, place: int, vocabulary: int) -> Tensor:
        if place not in self._noise:
            if len(self._noise) >= self.KEPT:
                self._noise.pop(min(self._noise))
            # On the CPU whatever the device: the same text on any machine.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + place)
            exponential = torch.empty(vocabulary, dtype=torch.float64).exponential_(generator=generator)
            self._noise[place] = exponential.log_().neg_().to(self._device)
        return self._noise[place]
