"""Attention for the few queries of a decoding step on a CPU.

torch's CPU kernel takes longer for one query of a head than for several, so heads that share keys and values are asked
as so many queries of one head: a step of SmolLM2 after 8,000 tokens takes 0.4 of the time (scripts/bench_attention.py,
docs/results.md).
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_few_queries"
MOST_QUERIES = 64  # of all heads that share keys; beyond, the kernel has enough to do


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:  # fmt: skip
    """Equals `scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)`.

    query [B, H, T, D]; key, value [B, G, L, D] with G groups of H/G heads; mask [B or 1, 1, T, L], or None for all.
    """
    if not _pays(query, key):
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    heads = query.shape[1] // key.shape[1]
    queries = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    mask = None if mask is None else mask.repeat(1, 1, heads, 1)
    return nn.functional.scaled_dot_product_attention(queries, key, value, mask, scale=scale).reshape(query.shape)


def use_grouped_attention(model: Any) -> None:
    """Let a transformers model that uses sdpa attend so where it can; nothing that is saved of it changes."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def _pays(query: Tensor, key: Tensor) -> bool:
    """Whether heads share keys, and have few queries together."""
    heads = query.shape[1] // key.shape[1]
    few = heads > 1 and heads * query.shape[2] <= MOST_QUERIES
    return few and query.device.type == "cpu" and not query.requires_grad


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **arguments: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' sdpa attention, but for a few queries whose mask all heads share."""
    is_plain = dropout == 0 and not any(arguments.get(name) is not None for name in ("position_bias", "softcap"))
    is_masked = query.shape[2] == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if not (is_plain and is_masked and _pays(query, key)):
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments
        )
        return whole
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
