"""The weights of a feature draft: one decoder layer over the target's hidden states and the next token's embedding.

EAGLE-3 (Li et al. 2025), with the tensor names that serving engines read. Shapes: B batch, T entries, D the draft's
hidden, E the target's, V the target's vocabulary, V_d rows of the head, L keys.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from decode.attention import grouped_attention
from decode.drafts.feature_config import TAPS
from decode.drafts.head import SIZE

KeysValues = tuple[Tensor, Tensor]


class LlamaForCausalLMEagle3(LlamaPreTrainedModel):  # type: ignore[misc]
    """Entry i holds the target's hidden states at token i and the embedding of token i + 1, and predicts token i + 2.

    It keeps no embeddings: they are the target's. Where the head is trimmed, d2t [V_d] maps a row r of it to the
    target's id r + d2t[r], and t2d [V] is True at those ids; a whole head has no map.
    """

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width, taps = config.hidden_size, getattr(config, TAPS)
        self.fc = nn.Linear(len(taps) * config.target_hidden_size, width, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        rows = getattr(config, SIZE)
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.rotary = ExactRotary(config)
        if rows < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads."""
        return tuple(getattr(self.config, TAPS))

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's id of each row of a trimmed head [V_d]; None for a whole one."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if hasattr(self, "d2t") else None

    def set_draft_ids(self, ids: Tensor) -> None:
        """Give each row of a trimmed head its id of the target, ids [V_d] ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    def map_fault(self) -> str | None:
        """What is wrong with the map of a trimmed head, if anything."""
        ids = self.draft_ids
        if ids is None:
            return None
        if not bool(((ids >= 0) & (ids < len(self.t2d))).all()) or not bool((ids.diff() > 0).all()):
            return "d2t does not map to different ids of the target in ascending order"
        if not torch.equal(self.t2d.nonzero().flatten(), ids):
            return "d2t and t2d do not name the same ids"
        return None

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, past: KeysValues | None = None,
        mask: Tensor | None = None, first: int = 0,
    ) -> tuple[Tensor, KeysValues]:  # fmt: skip
        """Hidden states [B, T - first, D] of the entries from `first` on, and all keys and values so far.

        embedded, hidden [B, T, D]; positions [B, T]; mask [B or 1, 1, T - first, L] is True where an entry sees a
        key, None: all see all. What comes out is the `hidden` of a next entry; `logits` are of it too.
        """
        rotation = self.rotary(hidden, positions)
        out, past = self.layers[0](embedded, hidden, rotation, past, mask, first)
        return out, past

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the head's rows: hidden [..., D] -> [..., V_d]."""
        return self.lm_head(self.norm(hidden))


class ExactRotary(LlamaRotaryEmbedding):  # type: ignore[misc]
    """RoPE whose frequencies stay in float32 when the model is cast.

    Rounded to bfloat16 they are off by 0.2 %, which is a whole radian some hundreds of tokens on.
    """

    inv_freq: Tensor

    def _apply(self, fn: Any, recurse: bool = True) -> "ExactRotary":
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self


class Eagle3Layer(GradientCheckpointingLayer):  # type: ignore[misc]
    """A Llama layer whose attention reads [normed embedding ; normed hidden] and whose residual is the hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], past: KeysValues | None,
        mask: Tensor | None, first: int,
    ) -> tuple[Tensor, KeysValues]:  # fmt: skip
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        attended, past = self.self_attn(read, rotation, past, mask, first)
        hidden = hidden[:, first:] + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), past


class Eagle3Attention(nn.Module):
    """Grouped-query attention over inputs [B, T, 2 D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.width = config.head_dim
        heads, groups = config.num_attention_heads * self.width, config.num_key_value_heads * self.width
        self.q_proj = nn.Linear(2 * config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, groups, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, groups, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(
        self, read: Tensor, rotation: tuple[Tensor, Tensor], past: KeysValues | None, mask: Tensor | None, first: int
    ) -> tuple[Tensor, KeysValues]:
        B, T, _ = read.shape
        cos, sin = rotation
        keys, values = (
            project(read).view(B, T, -1, self.width).transpose(1, 2) for project in (self.k_proj, self.v_proj)
        )
        queries = self.q_proj(read[:, first:]).view(B, T - first, -1, self.width).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, queries[:, :0], cos[:, first:], sin[:, first:])
        keys, _ = apply_rotary_pos_emb(keys, keys[:, :0], cos, sin)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        attended = grouped_attention(queries, keys, values, mask)
        return self.o_proj(attended.transpose(1, 2).reshape(B, T - first, -1)), (keys, values)


def unroll(model: Any, embedded: Tensor, hidden: Tensor, positions: Tensor, steps: int, first: int = 0) -> list[Tensor]:
    """The hidden states of each unrolled step, teacher-forced, as they are when drafting from every entry at once.

    Step j of entry i holds the draft's own output of step j - 1 there and the embedding of token i + 1 + j, stands at
    position i + j, and sees the first step's keys of entries up to i (true features) and its own chain's later ones.

    Args: embedded [B, T, D], of token i + 1 at entry i; hidden [B, T, D], `model.fc` of the target's hidden states;
    positions [B, T], which start again with each text where several share a sequence; steps >= 1. Outputs begin at
    entry `first`, before which nothing is wanted. Returns: `steps` tensors [B, T - first, D], of entries whose chain
    ran out of the sequence or into the next text too, which are to be ignored.
    """
    T = hidden.shape[1]
    texts = (positions == 0).cumsum(-1)
    own_text = texts.unsqueeze(-1) == texts.unsqueeze(-2)
    seen = (own_text & torch.ones_like(own_text).tril())[:, None, first:]
    itself = torch.eye(T - first, dtype=torch.bool, device=hidden.device).expand(len(hidden), 1, -1, -1)
    out, past = model(embedded, hidden, positions, mask=seen, first=first)
    found = [out]
    for step in range(1, steps):
        later = nn.functional.pad(embedded[:, first + step :], (0, 0, 0, min(step, T - first)))
        mask = torch.cat([seen, *[itself] * step], dim=-1)
        out, past = model(later, out, positions[:, first:] + step, past, mask)
        found.append(out)
    return found
