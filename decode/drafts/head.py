"""An output head over part of the vocabulary. The map of its rows to the target's ids travels inside the model.

Shapes: V_d rows of the head, D hidden.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from configs.errors import UserError
from configs.files import read_json
from decode.trust import INDEX, WEIGHTS, check_files, find_file

SIZE = "draft_vocab_size"  # in config.json, as in EAGLE-3 checkpoints
FEATURE_DRAFT = "LlamaForCausalLMEagle3"  # the architecture that config.json names, as engines know it


def is_feature_draft(config: Any) -> bool:
    """Whether a transformers config is that of a draft which reads its target's hidden states."""
    return FEATURE_DRAFT in (config.architectures or ())


def trim_head(model: Any, ids: Tensor) -> None:
    """Keep the head's rows of `ids` [V_d], in that order, in place. Logits are then [..., V_d]."""
    head = model.get_output_embeddings()
    trimmed = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, dtype=head.weight.dtype)
    with torch.no_grad():
        trimmed.weight.copy_(head.weight[ids])
        if head.bias is not None:
            trimmed.bias.copy_(head.bias[ids])
    model.set_output_embeddings(trimmed)
    model.config.tie_word_embeddings = False
    setattr(model.config, SIZE, len(ids))
    model.register_buffer("draft_ids", ids.clone())


def head_ids(model: Any) -> Tensor | None:
    """The target ids of the head's rows [V_d]; None for a head over the whole vocabulary."""
    ids: Tensor | None = getattr(model, "draft_ids", None)
    return ids


def scatter_logits(logits: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The logits [..., V_d] of a head over `ids` as logits over `rows` ids; those that it lacks are at -inf."""
    whole = logits.new_full((*logits.shape[:-1], rows), -torch.inf)
    whole[..., ids] = logits
    return whole


def map_fingerprint(ids: Tensor) -> str:
    """16 hex digits of a map."""
    return hashlib.sha256(ids.cpu().long().numpy().tobytes()).hexdigest()[:16]


def load_trimmed(location: str, config: Any, dtype: torch.dtype, **arguments: Any) -> Any:
    """Load a model whose head was trimmed. Raises UserError when weights and map do not belong together."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    trim_head(model, torch.zeros(getattr(config, SIZE), dtype=torch.long))
    load_weights(model, location, **arguments)
    check_map(model, Path(location).name)
    return model


def load_weights(model: Any, location: str, **arguments: Any) -> None:
    """Fill `model` from the safetensors of a folder or Hub id, in one file or in shards.

    Raises UserError unless every tensor fits.
    """
    check_files(location, location, **arguments)
    index = find_file(location, INDEX, **arguments)
    names = sorted(set(read_json(Path(index))["weight_map"].values())) if index else [WEIGHTS]
    weights: dict[str, Tensor] = {}
    for name in names:
        weights |= load_file(str(cached_file(location, name, **arguments)))
    try:
        model.load_state_dict({layer_name(name): weight for name, weight in weights.items()})
    except RuntimeError as error:
        raise UserError(
            f"{location}: its weights do not fit its config ({str(error).splitlines()[-1].strip()})"
        ) from None


def layer_name(tensor: str) -> str:
    """A tensor's name as we have it: the first EAGLE-3 drafts call their layer `midlayer`."""
    return tensor.replace("midlayer.", "layers.0.", 1) if tensor.startswith("midlayer.") else tensor


def check_map(model: Any, name: str) -> None:
    """Raises UserError when the map inside a draft is not the one that its config names, if it names one."""
    block, ids = getattr(model.config, "draftsmith", None) or {}, head_ids(model)
    said, found = block.get("vocabulary_map_hash"), None if ids is None else map_fingerprint(ids)
    if block and said != found:
        raise UserError(f"{name}: the vocabulary map inside it ({found}) is not the one that its config names ({said})")
