"""Reading several texts together: each keeps its own length in a cache whose slots all of them share."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from configs.errors import UserError
from decode.kv import Clock, cache_argument

DEPENDING = ("longrope", "dynamic")  # RoPE whose angles depend on how long the longest text is
WASTE = 0.25  # share of slots that no text needs, from which on they are squeezed out


class BatchReader:
    """Like decode.kv.Reader for B texts. A slot of the cache belongs to all of them, and `held` [B, slots] says which
    text has a token in it: what a text takes back, or has no token for, is masked for it and squeezed out later.

    Positions count each text's own tokens, so a text sees what it would see alone.
    """

    def __init__(self, model: Any, rows: int, clock: Clock = perf_counter, taps: Sequence[int] = ()) -> None:
        if model.config.is_encoder_decoder:
            raise UserError("an encoder–decoder model reads one text at a time: no batches")
        self.model, self.taps, self._clock = model, tuple(taps), clock
        self.forward_s = 0.0
        self.tapped: Tensor | None = None
        self.held = torch.zeros(rows, 0, dtype=torch.bool, device=next(model.parameters()).device)
        self._cache = DynamicCache(config=model.config)
        self._cache_name = cache_argument(model)
        other = sorted({type(layer).__name__ for layer in self._cache.layers if type(layer) is not DynamicLayer})
        if other:
            raise UserError(
                f"a batch of more than one text needs a cache that keeps every token; this model's has {other[0]} "
                "(sliding windows or a running state): decode one text at a time"
            )

        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") in DEPENDING:
            raise UserError(
                f"RoPE of type {rope['rope_type']} turns by the longest text of a batch, which changes the answers of "
                "the others: decode one text at a time"
            )

    @property
    def lengths(self) -> Tensor:
        """Tokens that each text has read [B]."""
        return self.held.sum(-1)

    def read(self, ids: Tensor, fresh: Tensor, keep: int) -> Tensor:
        """Append `ids` [B, T] where `fresh` [B, T], and return logits [B, keep, V] of the last `keep` columns.

        Right-aligned chunks put every text's last token in the last column.
        """
        T = ids.shape[1]
        positions = (self.lengths.unsqueeze(-1) + fresh.cumsum(-1) - 1).clamp(min=0)
        self.held = torch.cat([self.held, fresh], dim=1)
        kept = 0 if keep == T else torch.arange(T - keep, T, device=ids.device)
        began = self._clock()
        output = self.model(
            input_ids=ids, attention_mask=self.held.long(), position_ids=positions, use_cache=True,
            logits_to_keep=kept, output_hidden_states=bool(self.taps), **{self._cache_name: self._cache},
        )  # fmt: skip
        self.forward_s += self._clock() - began
        if self.taps:
            self.tapped = torch.cat([output.hidden_states[layer] for layer in self.taps], dim=-1)
        return output.logits

    def rewind(self, lengths: Tensor) -> None:
        """Take back every token of each text from its position `lengths` [B] on."""
        self.held = self.held & (self.held.cumsum(-1) <= lengths.unsqueeze(-1))
        longest = int(self.lengths.max())
        if longest < (1 - WASTE) * self.held.shape[1]:
            order = squeezed(self.held, longest)
            for layer in self._cache.layers:
                layer.keys, layer.values = (gathered(part, order) for part in (layer.keys, layer.values))
            self.held = self.held.gather(1, order)

    def select(self, rows: Tensor) -> None:
        """Go on with these texts alone."""
        self._cache.batch_select_indices(rows)
        self.held = self.held[rows]


def right_aligned(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and where they are of the text and not padding [B, T], each row at the right end."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    fresh = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return ids, fresh


def squeezed(held: Tensor, width: int) -> Tensor:
    """The last `width` slots [B, width] once those that hold nothing [B, slots] are moved to the front, in order."""
    return held.int().argsort(dim=1, stable=True)[:, -width:]


def gathered(part: Tensor, order: Tensor) -> Tensor:
    """Keys or values [B, heads, slots, width] in this order of slots [B, n]."""
    return part.gather(2, order[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
