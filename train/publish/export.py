"""A draft folder in the form that a serving engine loads, with the command that serves it."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.errors import UserError
from configs.files import whole_folder, write_json, write_text, writing
from decode.drafts.eagle3_model import LlamaForCausalLMEagle3
from decode.drafts.feature_config import TAPS
from decode.drafts.head import SIZE, head_ids, is_feature_draft, map_fingerprint
from decode.drafts.kinds import load_feature_weights
from decode.encoder_decoder import transformers_model
from decode.models import (
    Loaded,
    describe_model,
    load_model,
    load_tokenizer,
    read_model_config,
)  # fmt: skip
from decode.pairing import check_pair
from decode.reference import parse_reference
from decode.trust import find_file, stays_inside
from train.publish.engine_forms import BODY, flat_config, speculators_form
from train.publish.fetch import is_at_hand
from train.publish.parity import check_feature_export, check_plain_export, share_of_rows
from train.publish.serve import UNMEASURED_LENGTH, serve_command

CARRIED = ("report.json", "training.json", "LICENSE")
WRITTEN = {*BODY, SIZE, TAPS, "use_cache"}  # of config.json; the rest are defaults
NEVER = -1e4  # bias of a row that must not win, where a head has one


@dataclass(frozen=True)
class Exported:
    """`notes` are what the user should know of it, a line each; `command` serves it."""

    folder: Path
    command: str
    notes: tuple[str, ...]


def export(draft: str, out: Path, engine: str, target: str | None = None) -> Exported:
    """Write `draft` to the folder `out` as `engine` (transformers, vllm, sglang) reads it; an adapter is merged.

    `target` is by default the one that the draft names. What was written is read again by the engine's rules and must
    give the logits of the trained draft.

    Raises UserError when `out` is there already, when target and draft do not fit, and when the engine would refuse
    the draft or misread it.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder")
    config = read_model_config(draft)
    said = getattr(config, "draftsmith", None)
    block = dict(said) if isinstance(said, dict) else {}
    kind = "eagle3" if is_feature_draft(config) else "lm"
    if kind == "eagle3" and engine == "transformers":
        raise UserError(
            f"{draft}: a feature draft reads its target's hidden states, which transformers' assisted generation does "
            "not hand over; decode it with `draftsmith decode`, or export it to vllm or sglang"
        )
    if config.is_encoder_decoder and engine != "transformers":
        raise UserError(
            f"{draft}: {engine} serves no encoder–decoder models of this family; export it to transformers, whose "
            "assisted generation takes it"
        )
    if config.is_encoder_decoder and config.num_layers < config.num_decoder_layers:
        raise UserError(
            f"{draft}: its decoder has {config.num_decoder_layers} layers and its encoder {config.num_layers}; "
            "transformers' generate fails on such a model: train one with more of draft.encoder_layers"
        )
    served, notes = _target(target, block)
    name = target or str(block.get("target") or "TARGET")
    gamma = block.get("recommended_num_draft_tokens")
    if not gamma:
        gamma = UNMEASURED_LENGTH
        notes.append(f"γ = {gamma} was not measured; `draftsmith eval` finds the one that pays here")
    block |= {"kind": kind, "export": {"engine": engine}}
    block.setdefault("target", Path(name).name if Path(name).exists() else name.partition("@")[0])
    if kind == "eagle3":
        ready = _feature_draft(draft, config, served, notes)
    else:
        ready = _plain_draft(draft, block, served, gamma, notes)
    with writing(out, out.with_name(out.name + ".tmp")), whole_folder(out) as unfinished:
        ready.tokenizer.save_pretrained(unfinished)
        if kind == "eagle3":
            architectures = list(served.model.config.architectures or []) if served else []
            _write_feature_draft(ready.model, block, engine, architectures, gamma, unfinished)
        else:
            ready.model.config.draftsmith = block
            transformers_model(ready.model).save_pretrained(unfinished)
            check_plain_export(ready.trained, unfinished)
        another = kind == "lm" and getattr(config, SIZE, None)  # with its whole head it is not what was measured
        _carry(draft, CARRIED[1:] if another else CARRIED, unfinished)
    command = serve_command(engine, kind, name, str(out), gamma, config.is_encoder_decoder)
    return Exported(out, command, tuple(notes))


@dataclass(frozen=True)
class Ready:
    """A draft that is about to be written; `trained` is what a plain one was before, in float32."""

    model: Any
    tokenizer: Any
    trained: Any = None


def _carry(draft: str, files: tuple[str, ...], out: Path) -> None:
    reference = parse_reference(draft)
    for file in files:
        found = find_file(reference.location, file, **reference.arguments())
        if found and (not reference.is_local or stays_inside(Path(found), Path(reference.location))):
            write_text(out / file, Path(found).read_text(encoding="utf-8"))


def _target(asked: str | None, block: Mapping[str, Any]) -> tuple[Loaded | None, list[str]]:
    """Config and tokenizer of the target; None, with a note, where the draft's own word for it leads nowhere."""
    said = block.get("target")
    if asked is not None:
        return describe_model(asked), []
    if not said:
        raise UserError("the draft does not name its target; name it with --target")
    note = f"target {said} is not to be had here, so nothing was compared with it; --target names a copy"
    try:
        return (describe_model(str(said)), []) if is_at_hand(str(said)) else (None, [note])
    except UserError:  # gated, or no model
        return None, [note]


def _feature_draft(draft: str, config: Any, target: Loaded | None, notes: list[str]) -> Ready:
    model = load_feature_weights(draft, config, torch.float32, target)
    if target is None:
        return Ready(model, load_tokenizer(draft))
    model.generation_config = target.model.generation_config
    try:
        tokenizer = load_tokenizer(draft)
    except UserError:
        tokenizer = target.tokenizer  # engines use that one
    _check_pair(target, Loaded(model, tokenizer, draft, "", model.dtype), notes)
    if config.max_position_embeddings != target.context_tokens:
        notes.append(f"context set to the target's: {target.context_tokens} tokens")
        config.max_position_embeddings = target.context_tokens
    return Ready(model, tokenizer)


def _check_pair(target: Loaded, draft: Loaded, notes: list[str]) -> None:
    """As decoding does; what it warns of becomes a note."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_pair(target, draft)
    notes += [str(warning.message) for warning in said]


def _write_feature_draft(
    model: LlamaForCausalLMEagle3, block: dict[str, Any], engine: str, architectures: list[str], gamma: int,
    out: Path,
) -> None:  # fmt: skip
    dtype = model.config.dtype or torch.float32
    written = {key: value for key, value in model.config.to_dict().items() if key in WRITTEN and value is not None}
    block["vocabulary_map_hash"] = None if model.draft_ids is None else map_fingerprint(model.draft_ids)
    written |= {"draftsmith": block, "dtype": str(dtype).removeprefix("torch.")}
    written["eagle_config"] = {TAPS: [tap - 1 for tap in model.taps], "use_aux_hidden_state": True}
    written["num_aux_hidden_states"] = len(model.taps)
    if engine == "vllm":
        whole = speculators_form(written, str(block["target"]), architectures or ["LlamaForCausalLM"], gamma)
    else:
        whole = flat_config(written)
    tensors = {key: _stored(tensor, dtype) for key, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", whole)
    check_feature_export(model.to(dtype).float(), out, engine)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _plain_draft(draft: str, block: dict[str, Any], target: Loaded | None, gamma: int, notes: list[str]) -> Ready:
    loaded = load_model(draft, device="cpu")
    if target is not None:
        _check_pair(target, loaded, notes)
    model, ids = loaded.model, head_ids(loaded.model)
    trained = copy.deepcopy(model).float()
    rows = int((target.model if target else model).config.vocab_size)
    kept = torch.arange(min(rows, int(model.config.vocab_size))) if ids is None else ids
    whole_vocabulary(model, rows)
    empty = torch.ones(rows, dtype=torch.bool)
    empty[kept] = False
    block["vocabulary_map_hash"] = None
    generation = model.generation_config
    generation.num_assistant_tokens, generation.num_assistant_tokens_schedule = gamma, "constant"
    generation.assistant_confidence_threshold = 0.0  # draft γ tokens, as it was measured
    if bool(empty.any()):
        share, chosen = share_of_rows(model, loaded.tokenizer, empty)
        block["export"] |= {"empty_rows": int(empty.sum()), "empty_rows_share": share, "empty_rows_chosen": chosen}
        notes.append(
            f"{int(empty.sum())} of {rows} rows of the head are empty (padding, or cut when it was trimmed): they get "
            f"{share:.2%} of the draft's probability, and are its first choice at {chosen:.2%} of places"
        )
    if ids is not None:
        notes.append(
            f"the head has all {rows} rows instead of {len(ids)}: a draft step costs more than the report's c, so "
            "measure this folder with `draftsmith eval` too"
        )
        block["recommended_num_draft_tokens"] = None
    return Ready(model, loaded.tokenizer, trained)


def whole_vocabulary(model: Any, rows: int) -> None:
    """Give a causal LM a head and embeddings of `rows` rows, in place; ids that it had no row for get zeros.

    A row of zeros has logit 0, which seldom wins; where the head has a bias, it never does. Raises UserError for an
    encoder–decoder model of another size.
    """
    ids, head = head_ids(model), model.get_output_embeddings()
    before = int(model.config.vocab_size)
    if model.config.is_encoder_decoder and rows != before:
        raise UserError(
            f"the draft has {before} rows of vocabulary and its target {rows}, which transformers does not draft with"
        )
    with torch.no_grad():
        if ids is not None:
            whole = nn.Linear(head.in_features, before, bias=head.bias is not None, dtype=head.weight.dtype)
            whole.weight.zero_()[ids] = head.weight
            if head.bias is not None:
                whole.bias.fill_(NEVER)[ids] = head.bias
            model.set_output_embeddings(whole)
            del model.draft_ids
            delattr(model.config, SIZE)
        if rows != before:
            model.resize_token_embeddings(rows, mean_resizing=False)
            for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                table.weight[before:] = 0
                if getattr(table, "bias", None) is not None:
                    table.bias[before:] = NEVER
    model.config.vocab_size = rows
