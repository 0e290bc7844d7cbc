"""Drafts and targets that are LoRA adapters of another model (peft), as they are when merged into it."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from decode.trust import PICKLE, find_file, is_trusted, pickle_advice

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_base(location: str, **arguments: Any) -> str | None:
    """The model that the adapter in a folder or Hub repository belongs to; None where there is no adapter.

    A relative path is looked up from here, then from the adapter's folder. Raises UserError for one that names no base.
    """
    file = find_file(location, ADAPTER_CONFIG, **arguments)
    if file is None:
        return None
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError:
        said = {}
    base = said.get("base_model_name_or_path")
    if not base:
        raise UserError(f"{location}: {ADAPTER_CONFIG} names no base model (base_model_name_or_path)")
    beside = Path(location) / base
    if not Path(base).exists() and beside.exists():
        return str(beside)
    if not Path(base).exists() and (Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1):
        raise UserError(f"{location}: its base model {base} is gone; put it there, or correct {ADAPTER_CONFIG}")
    revision = said.get("revision")
    return f"{base}@{revision}" if revision and not Path(base).exists() else str(base)


def merge_adapter(model: Any, location: str, dtype: torch.dtype, **arguments: Any) -> Any:
    """`model` in float32 with the adapter's weights added to its own, then in `dtype`.

    Raises UserError for an adapter that does not fit.
    """
    from peft import PeftModel

    if find_file(location, ADAPTER_WEIGHTS, **arguments) is None and not is_trusted(PICKLE):
        raise UserError(f"{location}: no {ADAPTER_WEIGHTS}; if its weights are pickled{pickle_advice()}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # peft goes on without them
            merged = PeftModel.from_pretrained(model, location, **arguments).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, UserWarning) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{location}: the adapter does not fit its base model ({first})") from error
    for parameter in merged.parameters():  # and no buffer: RoPE's frequencies stay as exact as they are
        parameter.data = parameter.data.to(dtype)
    return merged
