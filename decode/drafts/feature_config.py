"""The config of a feature draft: as we write it, and as other tools do."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from configs.errors import UserError
from decode.drafts.head import FEATURE_DRAFT, SIZE

TAPS = "eagle_aux_hidden_state_layer_ids"  # in config.json: indices into the target's hidden_states (0: embeddings)
OTHERWISE = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "attention_bias")


def eagle3_config(target: Any, taps: tuple[int, ...], head_rows: int) -> LlamaConfig:
    """One layer of a Llama body with the shape of `target`'s transformers config.

    Written for engines as well: vLLM reads the taps as they are, SGLang counts them from one layer later.
    """
    config = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=target.intermediate_size,
        num_hidden_layers=1, num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        hidden_act=target.hidden_act, max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps, rope_parameters=copy.deepcopy(target.rope_parameters),
        tie_word_embeddings=False, bos_token_id=target.bos_token_id, eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id, dtype=torch.float32,
    )  # fmt: skip
    config.target_hidden_size = target.hidden_size
    config.num_aux_hidden_states = len(taps)
    setattr(config, SIZE, head_rows)
    setattr(config, TAPS, list(taps))
    config.eagle_config = {TAPS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
    return config


def complete_config(config: Any, text: str) -> Any:
    """`config` with what other tools leave to defaults written down, in place.

    Raises UserError for a draft that is computed in another way than ours, and for one that does not say what it reads.
    """
    otherwise = [name for name in OTHERWISE if getattr(config, name, None)]
    if otherwise or config.num_hidden_layers != 1:
        what = ", ".join(otherwise) or f"{config.num_hidden_layers} layers"
        raise UserError(f"{text}: an EAGLE-3 draft with {what}, which is another computation than this decoder has")
    for_sglang = (getattr(config, "eagle_config", None) or {}).get(TAPS)
    if not getattr(config, TAPS, None):
        if not for_sglang:
            raise UserError(f"{text}: its config does not name the target's layers that it reads ({TAPS})")
        setattr(config, TAPS, [tap + 1 for tap in for_sglang])
    if getattr(config, "target_hidden_size", None) is None:
        config.target_hidden_size = config.hidden_size
    if getattr(config, SIZE, None) is None:
        setattr(config, SIZE, config.vocab_size)
    return config


def speculators_config(file: str | None, text: str) -> LlamaConfig | None:
    """The config in a config.json of the speculators form, which transformers does not know; None for another one.

    Raises UserError for a body that is not Llama's.
    """
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("speculators_model_type") != "eagle3":
        return None
    layer = said.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return None
    if layer.get("model_type", "llama") != "llama":
        raise UserError(f"{text}: an EAGLE-3 draft with a {layer['model_type']} body; this decoder has Llama's")
    config = LlamaConfig(**{key: value for key, value in layer.items() if key not in ("architectures", "model_type")})
    for key in (TAPS, SIZE, "target_hidden_size", *OTHERWISE[:-1]):
        if said.get(key) is not None:
            setattr(config, key, said[key])
    if "norm_before_residual" not in said:
        config.norm_before_residual = True  # what speculators takes it for
    config.architectures = [FEATURE_DRAFT]
    return config
