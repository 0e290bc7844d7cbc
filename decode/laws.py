"""From logits to probabilities: the only place where temperature, filters and penalties exist.

Shapes: B batch, N places in a row, V vocabulary, L tokens of text.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError

NUCLEUS_WIDTH = 256  # most nuclei are smaller; a sort of the whole vocabulary takes milliseconds on a CPU


@dataclass(frozen=True)
class Law:
    """How the next token is chosen: processors, then temperature, top-k, top-p, min-p, in transformers' order.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `processors` are transformers' LogitsProcessors,
    called as processor(ids [B, l], scores [B, V]) with the very prefix of each place (decode/processors.py makes the
    usual ones). They must be functions of what they are given: a rejected draft is never taken back.
    Ids from `vocabulary` on are padding of the output head, and never chosen; None is no padding.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: tuple[Any, ...] = ()
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p {self.min_p}: expected 0 (off) to 1")

        if self.is_greedy and (self.top_k or self.top_p < 1 or self.min_p):
            raise UserError("top_k, top_p and min_p have no effect at temperature 0 (greedy); leave them out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def greedy(self) -> "Law":
        """The same at temperature 0, where filters have no use."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    def __call__(self, logits: Tensor, text: Tensor | None = None) -> Tensor:
        """Probabilities of the next token at each of N places.

        Args: logits [..., N, V], any float dtype, not changed; text [B, L], the tokens up to the last place's prefix:
        place i of N has the prefix text[:, : L - (N - 1 - i)]. Only processors look at it.
        Returns: [..., N, V] in float32, or float64 for float64 logits; greedy is one-hot at the lowest best id.
        """
        logits = self.scores(logits, text)
        if self.is_greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = logits - logits.amax(-1, keepdim=True)  # so that a tiny temperature cannot overflow
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            lowest_kept = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
        if self.top_p < 1:
            probs = logits.softmax(-1)
            # Equally likely tokens stay together, so that the law does not depend on how a kernel orders them.
            logits = logits.masked_fill(probs < _nucleus_floor(probs, self.top_p), -torch.inf)
        probs = logits.softmax(-1)
        if self.min_p > 0:
            probs = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def scores(self, logits: Tensor, text: Tensor | None = None) -> Tensor:
        """The logits after padding and processors, before temperature and filters. Shapes as in a call."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.vocabulary is not None and self.vocabulary < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= self.vocabulary
            logits = logits.masked_fill(padding, -torch.inf)
        if self.processors:
            assert text is not None, "a law with processors needs the text"
            logits = self._process(logits, text)
        return logits

    def _process(self, logits: Tensor, text: Tensor) -> Tensor:
        places, length = logits.shape[-2], text.shape[1]
        rows = []
        for place in range(places):
            scores = logits[:, place].clone()  # some processors write into what they are given
            for processor in self.processors:
                scores = processor(text[:, : length - (places - 1 - place)], scores)
            rows.append(scores)
        return torch.stack(rows, dim=1)


def _nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """Probability of the least likely token in the smallest set whose mass reaches `top_p`. [..., 1]."""
    if probs.device.type != "cpu" or probs.shape[-1] <= NUCLEUS_WIDTH:  # elsewhere a look at the mass would wait
        return _floor_within(probs.sort(dim=-1, descending=True).values, top_p)[0]
    floor, reached = _floor_within(probs.topk(NUCLEUS_WIDTH, dim=-1).values, top_p)
    if not reached.all():
        floor[~reached] = _floor_within(probs[~reached].sort(dim=-1, descending=True).values, top_p)[0]
    return floor


def _floor_within(ordered: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The floor [..., 1] among the likeliest, `ordered` [..., n], and whether these reach `top_p` [...]."""
    mass = ordered.cumsum(-1)
    inside = mass - ordered < top_p
    inside[..., 0] = True
    return ordered.masked_fill(~inside, torch.inf).amin(-1, keepdim=True), mass[..., -1] >= top_p
