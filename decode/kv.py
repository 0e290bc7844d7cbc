"""A causal LM together with the key/value cache of the tokens it has read."""

import copy
import inspect
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from decode.compiled import uncompiled

Clock = Callable[[], float]


class Reader:
    """Reads tokens once, and forgets the last ones by moving back; nothing is ever read twice.

    One text at a time (B = 1); `length` is the number of tokens read, `forward_s` the time spent in forwards.
    `taps` are indices into the model's hidden_states (0: embeddings); `tapped` [B, T, D·taps] holds those of the last
    T tokens read, side by side.
    """

    def __init__(self, model: Any, clock: Clock = perf_counter, taps: Sequence[int] = ()) -> None:
        self.model = model
        self.taps = tuple(taps)
        self.tapped: Tensor | None = None
        self.length = 0
        self.forward_s = 0.0
        self._clock = clock
        self._cache = model.empty_cache() if hasattr(model, "empty_cache") else DynamicCache(config=model.config)
        for layer in self._cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()  # sliding windows keep what a rejection may bring back
        self._cache_name = cache_argument(model)

    def read(self, ids: Tensor, keep: int | None = None) -> Tensor:
        """Append `ids` [B, T] and return logits [B, keep, V] of the last `keep` of them (default: all)."""
        T = ids.shape[1]
        # By index where not all (0): a slice has strides with which bfloat16 products on CPU are 12 times slower.
        kept = 0 if keep in (None, T) else torch.arange(T - keep, T, device=ids.device)
        began = self._clock()
        output = self.model(
            input_ids=ids, use_cache=True, logits_to_keep=kept,
            output_hidden_states=bool(self.taps), **{self._cache_name: self._cache},
        )  # fmt: skip
        self.forward_s += self._clock() - began
        self.length += T
        if self.taps:
            self.tapped = torch.cat([output.hidden_states[layer] for layer in self.taps], dim=-1)
        return output.logits

    @property
    def can_rewind(self) -> bool:
        """False when the model keeps a running state that cannot be taken back; known once something was read."""
        return bool(getattr(self._cache, "is_croppable", True))

    @property
    def keeps_everything(self) -> bool:
        """Whether it can move back to any place: not with sliding windows, a running state or an encoder."""
        return type(self._cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self._cache.crop(length - self.length)  # by 0 too: short-convolution layers then drop what they kept for this
        self.length = length

    def clone(self) -> "Reader":
        """An independent reader that has read the same tokens."""
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        return twin

    def beginning(self, length: int, clock: Clock) -> "Reader":
        """An independent reader that has read the first `length` tokens; only where it keeps everything."""
        assert self.keeps_everything
        twin = copy.copy(self)
        twin._clock = clock
        twin._cache, twin.length, twin.tapped = copy.copy(self._cache), min(length, self.length), None
        twin._cache.layers = [copy.copy(layer) for layer in self._cache.layers]
        for layer in twin._cache.layers:
            layer.keys, layer.values = (part[:, :, : twin.length].clone() for part in (layer.keys, layer.values))
        return twin

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """The cached keys and values [B, heads, length, width] of each layer, for checks."""
        return [(layer.keys, layer.values) for layer in self._cache.layers]


def cache_argument(model: Any) -> str:
    """transformers 5.24 renamed the forward argument `past_key_values` to `cache`; both are served."""
    return "cache" if "cache" in inspect.signature(uncompiled(model).forward).parameters else "past_key_values"
