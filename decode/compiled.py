"""Compiled forwards over a cache of fixed size: one graph for each block width. CUDA graphs on a GPU."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from configs.errors import UserError

GRAPHS = 64  # torch stops compiling after 8 widths otherwise


class Compiled(nn.Module):
    """A causal LM that is called like the model itself. Forwards of up to `widest` tokens are compiled, others not.

    All texts use the one cache in turn, so only one may be decoded at a time; a text of more than `context_tokens`
    does not fit. Rolling back moves the cache's write pointer. Each width costs half a minute on a CPU once, which a
    short run does not earn back (docs/results.md). `backend` and `mode` are torch.compile's.
    Raises UserError for an encoder–decoder model, and one without full attention in every layer.
    """

    def __init__(
        self, model: Any, context_tokens: int, widest: int = 16, backend: str = "inductor", mode: str | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.widest = widest
        if model.config.is_encoder_decoder:
            raise UserError("compiled decoding needs a causal model; leave compile out for an encoder–decoder one")
        self.config = copy.deepcopy(model.config)
        self.config.max_position_embeddings = min(context_tokens, model.config.max_position_embeddings)
        self.generation_config = model.generation_config
        self.draft_ids = getattr(model, "draft_ids", None)
        self._cache = StaticCache(config=model.config, max_cache_len=self.config.max_position_embeddings)
        if any(type(layer) is not StaticLayer for layer in self._cache.layers):
            raise UserError("compiled decoding needs full attention in every layer; leave compile out for this model")
        if mode is None and backend == "inductor" and self.device.type == "cuda":
            mode = "reduce-overhead"  # CUDA graphs
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
        self._compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=False, backend=backend, mode=mode)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def empty_cache(self) -> StaticCache:
        """The cache, emptied for a new text."""
        self._cache.reset()
        return self._cache

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        if input_ids.shape[1] > self.widest:
            return self.model(input_ids=input_ids, **arguments)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        # A slice of a longer text has its strides, and each stride would be compiled for.
        return self._compiled(input_ids=input_ids.clone(memory_format=torch.contiguous_format), **arguments)


def uncompiled(model: Any) -> Any:
    """The model itself."""
    return model.model if isinstance(model, Compiled) else model
