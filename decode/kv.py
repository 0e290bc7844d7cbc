"""A causal LM together with the key/value cache of the tokens it has read."""

import copy
import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache


class Reader:
    """Reads tokens once, and forgets the last ones by moving back; nothing is ever read twice.

    One text at a time (B = 1); `length` is the number of tokens read.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.length = 0
        self._cache = DynamicCache(config=model.config)
        self._cache_name = cache_argument(model)

    def read(self, ids: Tensor, keep: int | None = None) -> Tensor:
        """Append `ids` [B, T] and return logits [B, keep, V] of the last `keep` of them (default: all)."""
        output = self.model(
            input_ids=ids, use_cache=True, logits_to_keep=ids.shape[1] if keep is None else keep,
            **{self._cache_name: self._cache},
        )  # fmt: skip
        self.length += ids.shape[1]
        return output.logits

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self._cache.crop(length - self.length)
        self.length = length

    def clone(self) -> "Reader":
        """An independent reader that has read the same tokens."""
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        return twin

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """The cached keys and values [B, heads, length, width] of each layer, for checks."""
        return [(layer.keys, layer.values) for layer in self._cache.layers]


def cache_argument(model: Any) -> str:
    """transformers 5.24 renamed the forward argument `past_key_values` to `cache`; both are served."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
