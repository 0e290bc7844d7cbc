"""A draft made from an encoder–decoder target (decode/encoder_decoder.py)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from configs.errors import UserError
from decode.encoder_decoder import EncoderDecoder
from distill.build import chosen_layers

# Where only the first layer of a stack has one, it serves all of them.
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"


def cut_encoder_decoder(
    target: EncoderDecoder, layers: Sequence[int], encoder_layers: Sequence[int]
) -> EncoderDecoder:  # fmt: skip
    """The chosen layers of the target's decoder and encoder (none named: all of it), with its embeddings, norms and
    head, all copied, in float32, without dropout. The encoder is read once for an answer, so a whole one costs a draft
    little.

    Raises UserError for a layer that the target does not have or that is named twice.
    """
    source, config = target.model.state_dict(), copy.deepcopy(target.config)
    depths = {"decoder": config.num_decoder_layers, "encoder": config.num_layers}
    chosen = {
        "decoder": chosen_layers(layers, depths["decoder"], "draft.layers"),
        "encoder": chosen_layers(encoder_layers or range(depths["encoder"]), depths["encoder"], "draft.encoder_layers"),
    }
    config.num_decoder_layers, config.num_layers = len(chosen["decoder"]), len(chosen["encoder"])
    config.dtype, config.dropout_rate = torch.float32, 0.0
    weights = {name: weight for name, weight in source.items() if ".block." not in name}
    for stack, kept in chosen.items():
        for new, old in enumerate(kept):
            marker = f"{stack}.block.{old}."
            weights |= {
                name.replace(marker, f"{stack}.block.{new}."): weight
                for name, weight in source.items()
                if name.startswith(marker)
            }
        weights.setdefault(f"{stack}.block.0.{BIAS}", source[f"{stack}.block.0.{BIAS}"])
    draft = type(target.model)(config)
    if target.model.lm_head.weight is not target.model.shared.weight:  # FLAN-T5's head is its own, whatever it says
        draft.lm_head.weight = nn.Parameter(draft.lm_head.weight.detach().clone())
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    draft.generation_config = copy.deepcopy(target.generation_config)
    return EncoderDecoder(draft).float()


def scratch_encoder_decoder(target: EncoderDecoder, depth: int, width: int, seed: int) -> EncoderDecoder:
    """A model of the target's architecture with `depth` layers of `width` in encoder and decoder, without dropout,
    random weights that only `seed` decides. Raises UserError for a width that holds no whole number of its heads."""
    config = copy.deepcopy(target.config)
    if width % config.d_kv:
        raise UserError(f"draft.width {width}: expected a multiple of {config.d_kv}, the size of the target's heads")
    config.d_ff = config.d_ff * width // config.d_model
    config.d_model, config.num_heads = width, width // config.d_kv
    config.num_layers = config.num_decoder_layers = depth
    config.dtype, config.dropout_rate = torch.float32, 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft: Any = type(target.model)(config).float()
    draft.generation_config = copy.deepcopy(target.generation_config)
    return EncoderDecoder(draft)
