"""An adapter and its base written as one draft folder, which pushes and serves as any other."""

from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.files import whole_folder, write_text, writing
from decode.adapters import adapter_base
from decode.drafts.eagle3_model import LlamaForCausalLMEagle3
from decode.drafts.head import is_feature_draft
from decode.drafts.kinds import with_weights
from decode.encoder_decoder import transformers_model
from decode.models import load_model, load_tokenizer, read_model_config
from decode.reference import parse_reference


def merge(adapter: str, out: Path) -> Path:
    """Write the draft that `adapter` makes of its base to the folder `out`, in the base's dtype.

    Raises UserError when it is no adapter, when it does not fit its base, and when `out` is there already.
    """
    reference = parse_reference(adapter)
    if adapter_base(reference.location, **reference.arguments()) is None:
        raise UserError(f"{adapter}: not an adapter (no adapter_config.json); it is whole as it is")
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder")
    config = read_model_config(adapter)
    model = _merged(adapter, config)
    with writing(out, out.with_name(out.name + ".tmp")), whole_folder(out) as unfinished:
        model.save_pretrained(unfinished)
        load_tokenizer(adapter).save_pretrained(unfinished)
        training = Path(reference.location) / "training.json"
        if training.is_file():
            write_text(unfinished / training.name, training.read_text(encoding="utf-8"))
    return out


def _merged(adapter: str, config: Any) -> Any:
    if not is_feature_draft(config):
        return transformers_model(load_model(adapter, device="cpu").model)
    dtype = config.dtype or torch.float32
    return with_weights(LlamaForCausalLMEagle3(config), adapter, dtype).to(dtype)
