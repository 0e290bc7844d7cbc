"""Which kind of draft lies in a folder or repository, and loading it for its target."""

from typing import Any, cast

import torch
from transformers import GenerationConfig

from configs.errors import UserError
from decode.adapters import adapter_base, merge_adapter
from decode.drafts.contract import Draft
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.eagle3_model import LlamaForCausalLMEagle3
from decode.drafts.feature_config import TAPS, complete_config
from decode.drafts.head import check_map, is_feature_draft, load_weights
from decode.drafts.lm import LMDraft
from decode.drafts.lookup import LookupDraft, LookupOrDraft
from decode.models import (
    UNLOADABLE,
    Loaded,
    adapter_revision,
    first_line,
    load_model,
    load_tokenizer,
    named_device,
    named_dtype,
    read_model_config,
)
from decode.pairing import check_pair
from decode.reference import parse_reference

LOOKUP = "lookup"


def load_draft(target: Loaded, text: str, dtype: str = "auto", device: str = "auto") -> Draft[Any]:
    """The draft in a folder, Hub id or GGUF file, for this target; or `lookup`, or `lookup+DRAFT`.

    Raises UserError when the two do not fit.
    """
    if looks_up(text):
        lookup, beside = LookupDraft(int(target.model.config.vocab_size)), trained_part(text)
        if text.endswith("+") or (beside and looks_up(beside)):
            raise UserError(f"{text}: expected {LOOKUP}, or {LOOKUP}+ and a trained draft")
        return LookupOrDraft(lookup, load_draft(target, beside, dtype, device)) if beside else lookup
    config = read_model_config(text)
    if is_feature_draft(config):
        return _load_eagle3(target, text, config, dtype, device)
    return LMDraft.of_pair(target, load_model(text, dtype, device))


def looks_up(text: str) -> bool:
    """Whether a draft's name says `lookup` or `lookup+DRAFT`. A folder of that name is `./lookup`."""
    return text == LOOKUP or text.startswith(f"{LOOKUP}+")


def trained_part(text: str) -> str | None:
    """The trained draft in a draft's name, if there is one."""
    return text if not looks_up(text) else text.partition("+")[2] or None


def draft_revision(text: str) -> str:
    """What the draft's weights are: the Hub commit, else a fingerprint of the local files."""
    trained = trained_part(text)
    revision = adapter_revision(trained) if trained else ""
    return "+".join(part for part in (LOOKUP if looks_up(text) else "", revision) if part)


def _load_eagle3(target: Loaded, text: str, config: Any, dtype: str, device: str) -> Eagle3Draft:
    wanted = target.model.dtype if dtype == "auto" else cast(torch.dtype, named_dtype(dtype))
    model = load_feature_weights(text, config, wanted, target)
    model.generation_config = target.model.generation_config or GenerationConfig()
    model = model.to(named_device(device), wanted).eval().requires_grad_(False)
    check_pair(target, Loaded(model, load_tokenizer(text), text, "", model.dtype))
    return Eagle3Draft(model, target.model.get_input_embeddings())


def load_feature_weights(text: str, config: Any, dtype: torch.dtype, target: Loaded | None) -> LlamaForCausalLMEagle3:
    """The module of a feature draft with its weights, its config completed and its map checked.

    Raises UserError for one that is computed in another way than ours, that is not whole, or that was made for another
    target than `target` (None: any).
    """
    complete_config(config, text)
    if target is not None:
        _check_features(text, config, target)
    try:
        model = with_weights(LlamaForCausalLMEagle3(config), text, dtype)
    except UserError:
        raise
    except UNLOADABLE as error:
        raise UserError(f"{text}: cannot be loaded as a feature draft ({first_line(error)})") from error
    fault = model.map_fault()
    if fault:
        raise UserError(f"{text}: its vocabulary map is broken: {fault}; train it again")
    check_map(model, text)
    return cast(LlamaForCausalLMEagle3, model)


def _check_features(text: str, config: Any, target: Loaded) -> None:
    name, width = target.model.config.model_type, target.model.config.hidden_size
    if config.target_hidden_size != width or config.vocab_size != target.model.config.vocab_size:
        raise UserError(
            f"{text}: reads hidden states of width {config.target_hidden_size} and "
            f"{config.vocab_size} ids; {target.name} ({name}) has {width} and {target.model.config.vocab_size}: "
            "use a draft made for this target"
        )
    if max(getattr(config, TAPS)) > target.model.config.num_hidden_layers:
        raise UserError(f"{text}: reads hidden states {getattr(config, TAPS)}, which {target.name} does not have")


def with_weights(model: Any, text: str, dtype: torch.dtype) -> Any:
    """`model` with the weights of a folder or Hub id; those of an adapter are added to its base's."""
    reference = parse_reference(text)
    base = adapter_base(reference.location, **reference.arguments())
    if base is None:
        load_weights(model, reference.location, **reference.arguments())
        return model
    return merge_adapter(with_weights(model, base, torch.float32), reference.location, dtype, **reference.arguments())
