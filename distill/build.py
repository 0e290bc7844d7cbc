"""A draft made from its target, and the folder a draft lives in."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from configs.errors import UserError
from configs.files import whole_folder, without_local_paths, write_json, writing
from decode.chat import template_fingerprint
from decode.drafts.eagle3_model import LlamaForCausalLMEagle3
from decode.drafts.feature_config import eagle3_config
from decode.drafts.head import head_ids, map_fingerprint
from decode.encoder_decoder import transformers_model
from decode.models import Loaded, tokenizer_fingerprint
from train.lora import has_lora, save_lora


def build_lm_draft(target: Any, layers: tuple[int, ...]) -> Any:
    """A causal LM with the chosen layers of `target`, its embeddings, norm and head, all copied, in float32.

    Raises UserError for a layer that the target does not have or that is named twice.
    """
    if not any(".layers.0." in name for name in target.state_dict()):
        raise UserError(
            f"a draft cannot be cut out of a {target.config.model_type} model: it names its layers otherwise"
        )
    chosen = chosen_layers(layers, target.config.num_hidden_layers, "draft.layers")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[layer] for layer in chosen]
    config.dtype = torch.float32
    draft = type(target)(config)
    weights = {name: weight for name, weight in target.state_dict().items() if ".layers." not in name}
    for new, old in enumerate(chosen):
        marker = f".layers.{old}."
        weights |= {
            name.replace(marker, f".layers.{new}."): weight
            for name, weight in target.state_dict().items()
            if marker in name
        }
    draft.load_state_dict(weights)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.float()


def chosen_layers(layers: Sequence[int], depth: int, name: str) -> list[int]:
    """Places of the named layers, -1 the last. Raises UserError for one that is not there or is named twice."""
    found = [layer % depth for layer in layers if -depth <= layer < depth]
    if len(found) < len(layers) or len(set(found)) < len(found):
        raise UserError(f"{name} {list(layers)}: expected different layers out of {-depth}..{depth - 1}")
    return found


def scratch_lm_draft(target: Any, depth: int, width: int, seed: int) -> Any:
    """A causal LM of the target's architecture with `depth` layers of `width`, random weights that only `seed` decides.

    Heads keep the target's size, and the MLP its ratio to the width. Raises UserError for a width that holds no whole
    number of heads.
    """
    config = copy.deepcopy(target.config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = config.num_attention_heads // config.num_key_value_heads
    if width % head:
        raise UserError(f"draft.width {width}: expected a multiple of {head}, the size of the target's heads")
    config.intermediate_size = config.intermediate_size * width // config.hidden_size
    config.num_attention_heads = width // head
    config.num_key_value_heads = max(1, width // head // groups)
    if config.num_attention_heads % config.num_key_value_heads:
        config.num_key_value_heads = 1
    config.hidden_size, config.head_dim, config.num_hidden_layers = width, head, depth
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-depth:]
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = type(target)(config).float()
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def build_eagle3_draft(target: Any, taps: tuple[int, ...], ids: Tensor | None, seed: int) -> LlamaForCausalLMEagle3:
    """A feature draft for a Llama-like `target`, its head over `ids` [V_d] (None: all), in float32.

    It starts from the last of the tapped hidden states, the target's last layer, norm and head; what reads the
    embedding starts from noise that only `seed` decides. Raises UserError for another kind of target.
    """
    last: Any = target.get_decoder().layers[-1] if hasattr(target.get_decoder(), "layers") else nn.Module()
    needed = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "input_layernorm", "post_attention_layernorm")
    if not set(needed) <= dict(last.named_modules()).keys():
        raise UserError(
            f"a feature draft needs a Llama-like target (llama, mistral, qwen); got {target.config.model_type}"
        )
    head = target.get_output_embeddings().weight
    config = eagle3_config(target.config, taps, len(head) if ids is None else len(ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = LlamaForCausalLMEagle3(config).float()
    layer, width = draft.layers[0], config.hidden_size
    with torch.no_grad():
        draft.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight[:, width:] = getattr(last.self_attn, name).weight
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        layer.mlp.load_state_dict(last.mlp.state_dict())
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        draft.norm.weight.copy_(target.get_decoder().norm.weight)
        draft.lm_head.weight.copy_(head if ids is None else head[ids])
        if ids is not None:
            draft.set_draft_ids(ids)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


def identity(target: Loaded, kind: str) -> dict[str, Any]:
    """The `draftsmith` block of a draft's config.json: whose draft it is."""
    return {
        "kind": kind,
        "encoder_decoder": bool(target.model.config.is_encoder_decoder),
        "target": _public_name(target),
        "target_revision": target.revision,
        "target_weights": _said_by_folder(target, "weights"),
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
        "chat_template_hash": template_fingerprint(target.tokenizer, target.template_arguments),
        "vocabulary_map_hash": None,
        "recommended_num_draft_tokens": None,
        "license": _said_by_folder(target, "license"),
    }


def save_draft(draft: Any, target: Loaded, kind: str, training: dict[str, Any], folder: Path) -> None:
    """Write a whole draft folder in one rename: weights in the target's dtype, tokenizer, training.json."""
    transformers.utils.logging.disable_progress_bar()  # a draft is written in a blink
    with writing(folder, folder.with_name(folder.name + ".tmp")), whole_folder(folder) as unfinished:
        block, ids = identity(target, kind), head_ids(draft)
        if ids is not None:
            block["vocabulary_map_hash"] = map_fingerprint(ids)
        if has_lora(draft):
            config = copy.deepcopy(draft.config)
            save_lora(draft, unfinished)
        else:
            stored = transformers_model(copy.deepcopy(draft).to(target.stored_dtype))
            config = stored.config
            stored.save_pretrained(unfinished)
        config.draftsmith = block
        config.architectures = [type(transformers_model(draft)).__name__]
        config.save_pretrained(unfinished)
        target.tokenizer.save_pretrained(unfinished)
        write_json(unfinished / "training.json", without_local_paths(training))


def _public_name(target: Loaded) -> str:
    """A Hub id as it is; for a local folder the model it says it is, else its bare name: never a path."""
    path = Path(target.name)
    name = path.name.removesuffix(".gguf")
    return (_said_by_folder(target, "model") or name) if path.exists() else target.name.partition("@")[0]


def _said_by_folder(target: Loaded, key: str) -> str | None:
    """What PROVENANCE.json in a local target says about it (scripts/get_smollm2 writes one)."""
    path = Path(target.name) / "PROVENANCE.json"
    return json.loads(path.read_text(encoding="utf-8")).get(key) if path.is_file() else None
