"""A draft folder in the form that a serving engine loads, with the command that serves it."""

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
from decode.adapters import find_file
from decode.drafts.eagle3_model import TAPS, LlamaForCausalLMEagle3
from decode.drafts.head import SIZE, check_map, head_ids, is_feature_draft
from decode.drafts.kinds import with_weights
from decode.models import (
    Loaded,
    check_pair,
    describe_model,
    load_model,
    load_tokenizer,
    parse_reference,
    read_model_config,
)  # fmt: skip
from train.publish.card_usage import UNMEASURED_LENGTH
from train.publish.engine_forms import BODY, flat_config, speculators_config
from train.publish.fetch import is_at_hand
from train.publish.parity import check_feature_export, check_plain_export, share_of_rows
from train.publish.serve import serve_command

CARRIED = ("report.json", "training.json", "LICENSE")
WRITTEN = {*BODY, SIZE, TAPS, "eagle_config", "dtype", "use_cache"}  # of config.json; the rest are defaults
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
    block = dict(getattr(config, "draftsmith", None) or {})
    kind = "eagle3" if is_feature_draft(config) else "lm"
    if kind == "eagle3" and engine == "transformers":
        raise UserError(
            f"{draft}: a feature draft reads its target's hidden states, which transformers' assisted generation does "
            "not hand over; decode it with `draftsmith decode`, or export it to vllm or sglang"
        )
    served, notes = _target(target, block)
    name = target or str(block.get("target") or "TARGET")
    gamma = block.get("recommended_num_draft_tokens")
    if not gamma:
        gamma = UNMEASURED_LENGTH
        notes.append(f"γ = {gamma} was not measured; `draftsmith eval` finds the one that pays here")
    with writing(out, out.with_name(out.name + ".tmp")), whole_folder(out) as unfinished:
        block["export"] = {"engine": engine}
        if kind == "eagle3":
            notes += _write_feature_draft(draft, config, block, served, engine, name, gamma, unfinished)
        else:
            notes += _write_plain_draft(draft, block, served, gamma, unfinished)
        load_tokenizer(draft).save_pretrained(unfinished)
        another = kind == "lm" and getattr(config, SIZE, None)  # with its whole head it is not what was measured
        _carry(draft, CARRIED[1:] if another else CARRIED, unfinished)
    return Exported(out, serve_command(engine, kind, name, str(out), gamma), tuple(notes))


def _carry(draft: str, files: tuple[str, ...], out: Path) -> None:
    reference = parse_reference(draft)
    for file in files:
        found = find_file(reference.location, file, **reference.arguments())
        if found:
            write_text(out / file, Path(found).read_text(encoding="utf-8"))


def _target(asked: str | None, block: Mapping[str, Any]) -> tuple[Loaded | None, list[str]]:
    """Config and tokenizer of the target; None, with a note, where the draft's own word for it leads nowhere."""
    said = block.get("target")
    if asked is None and not said:
        raise UserError("the draft does not name its target; name it with --target")
    if asked is None and not is_at_hand(str(said)):
        return None, [f"target {said} is not to be had here, so nothing was compared with it; --target names a copy"]
    return describe_model(asked or str(said)), []


def _write_feature_draft(
    draft: str, config: Any, block: dict[str, Any], target: Loaded | None, engine: str, name: str, gamma: int, out: Path
) -> list[str]:
    model = with_weights(LlamaForCausalLMEagle3(config), draft, torch.float32)
    fault = model.map_fault()
    if fault:
        raise UserError(f"{draft}: its vocabulary map is broken: {fault}; train it again")
    check_map(model, draft)
    written = {key: value for key, value in config.to_dict().items() if key in WRITTEN and value is not None}
    written["draftsmith"] = block
    notes, architectures = [], ["LlamaForCausalLM"]
    if target is not None:
        _check_features(draft, config, target)
        architectures = list(target.model.config.architectures or architectures)
        context = target.context_tokens
        if written["max_position_embeddings"] != context:
            notes.append(f"context set to the target's: {context} tokens")
            written["max_position_embeddings"] = context
    whole = (
        speculators_config(written, str(block.get("target") or Path(name).name), architectures, gamma)
        if engine == "vllm"
        else flat_config(written)
    )
    dtype = config.dtype or torch.float32
    tensors = {key: _stored(tensor, dtype) for key, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", whole)
    check_feature_export(model.to(dtype).float(), out, engine)
    return notes


def _check_features(draft: str, config: Any, target: Loaded) -> None:
    theirs = target.model.config
    pairs = [
        ("vocab_size", config.vocab_size, theirs.vocab_size),
        ("hidden size", config.target_hidden_size, theirs.hidden_size),
    ]
    for what, ours, wanted in pairs:
        if ours != wanted:
            raise UserError(f"{draft}: made for a target of {what} {ours}, and {target.name} has {wanted}")
    if max(getattr(config, TAPS)) > theirs.num_hidden_layers:
        raise UserError(f"{draft}: reads hidden states {getattr(config, TAPS)}, which {target.name} does not have")


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _write_plain_draft(draft: str, block: dict[str, Any], target: Loaded | None, gamma: int, out: Path) -> list[str]:
    loaded, notes = load_model(draft, device="cpu"), []
    if target is not None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            check_pair(target, loaded)
        notes += [str(warning.message) for warning in said]
    model, ids = loaded.model, head_ids(loaded.model)
    rows = int((target.model if target else model).config.vocab_size)
    kept = torch.arange(min(rows, int(model.config.vocab_size))) if ids is None else ids
    trained = load_model(draft, "float32", "cpu").model
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
    model.config.draftsmith = block
    model.save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)
    check_plain_export(trained, out)
    return notes


def whole_vocabulary(model: Any, rows: int) -> None:
    """Give a causal LM a head and embeddings of `rows` rows, in place; ids that it had no row for get zeros.

    A row of zeros has logit 0, which seldom wins; where the head has a bias, it never does.
    """
    ids, head = head_ids(model), model.get_output_embeddings()
    before = int(model.config.vocab_size)
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
