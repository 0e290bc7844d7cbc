"""A draft made from its target, and the folder a draft lives in."""

import copy
import json
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import Field

from configs.errors import UserError
from configs.files import whole_folder, without_local_paths, write_json
from configs.settings import StrictSettings
from decode.chat import template_fingerprint
from decode.drafts.head import head_ids, map_fingerprint
from decode.models import Loaded, tokenizer_fingerprint


class DraftSettings(StrictSettings):
    """The draft's kind and shape."""

    kind: Literal["lm"] = Field("lm", description="lm: a plain causal LM with the target's width and vocabulary.")
    layers: tuple[int, ...] = Field((0, -1), min_length=1, description="Layers of the target to keep; -1 is the last.")
    vocabulary: int = Field(0, ge=0, description="Ids in the draft's head: the most frequent in the answers; 0 is all.")


def build_lm_draft(target: Any, layers: tuple[int, ...]) -> Any:
    """A causal LM with the chosen layers of `target`, its embeddings, norm and head, all copied, in float32.

    Raises UserError for a layer that the target does not have or that is named twice.
    """
    if not any(".layers.0." in name for name in target.state_dict()):
        raise UserError(
            f"a draft cannot be cut out of a {target.config.model_type} model: it names its layers otherwise"
        )
    depth = target.config.num_hidden_layers
    chosen = [layer % depth if -depth <= layer < depth else None for layer in layers]
    if None in chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"draft.layers {list(layers)}: expected different layers out of {-depth}..{depth - 1}")
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


def identity(target: Loaded, kind: str) -> dict[str, Any]:
    """The `draftsmith` block of a draft's config.json: whose draft it is."""
    return {
        "kind": kind,
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
    with whole_folder(folder) as unfinished:
        stored = copy.deepcopy(draft).to(target.stored_dtype)
        stored.config.draftsmith = identity(target, kind)
        ids = head_ids(stored)
        if ids is not None:
            stored.config.draftsmith["vocabulary_map_hash"] = map_fingerprint(ids)
        stored.save_pretrained(unfinished)
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
