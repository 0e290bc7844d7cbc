"""Checks of a feature draft (EAGLE-3): what vLLM and SGLang refuse, and what they silently misread."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.drafts.feature_config import TAPS
from decode.drafts.head import FEATURE_DRAFT, SIZE, layer_name, map_fingerprint
from train.publish.engine_forms import REQUIRED_BODY, FeatureConfig, other_kind, read_feature_config, tensor_shapes
from train.publish.file_checks import RETRAIN
from train.publish.findings import DraftFolder, Finding, Header, compare_tensors, note

OPTIONAL = ("embed_tokens.weight", "t2d", "d2t")  # the last two: the map's own check
BUFFERS = ("inv_freq",)  # of older transformers; loaders skip them
EXPORT = "write it again with `draftsmith export`"
DEFAULT_TAPS = "(2, N/2, N-3)"


def feature_config(folder: DraftFolder) -> tuple[FeatureConfig | None, list[Finding]]:
    """What config.json describes, if it is an EAGLE-3 draft; findings where no more can be checked."""
    other = other_kind(folder.config)
    if other:
        return None, [
            note(f"a draft of kind {other}", "Nothing beyond its files is known here", "its own tool's checks")
        ]
    found = read_feature_config(folder.config)
    if found is None:
        looks = [any(name.endswith(end) for name in folder.headers) for end in ("hidden_norm.weight", "fc.weight")]
        if not all(looks):
            return None, []
        what = f"architectures is {folder.config.get('architectures')}, and the weights are a feature draft's"
        how = f"write {FEATURE_DRAFT}, or export it to vllm (speculators form)"
        return None, [Finding(what, "No engine knows it as one", how)]
    missing = [key for key in REQUIRED_BODY if not isinstance(found.body.get(key), int) or found.body[key] < 1]
    if missing:
        return None, [Finding(f"config.json does not give {', '.join(missing)}", "The draft has no shape", EXPORT)]
    return found, []


def engines_of(found: FeatureConfig) -> set[str]:
    """The engines that a folder of these forms is meant for."""
    return {"vllm" if form == "speculators" else "sglang" for form in found.forms}


def feature_checks(folder: DraftFolder, found: FeatureConfig) -> Iterator[Finding]:
    """Everything that does not need the target."""
    if "speculators" in found.forms:
        yield from _speculators(folder)
    yield from _layer(folder, found)
    yield from _taps(found)
    yield from _tensors(folder, found)
    yield from _map(folder, found)


def _speculators(folder: DraftFolder) -> Iterator[Finding]:
    said = folder.mapping("speculators_config")
    proposals = said.get("proposal_methods")
    first: Any = proposals[0] if isinstance(proposals, list) and proposals else None
    if not isinstance(first, dict) or not isinstance(first.get("speculative_tokens"), int):
        yield Finding(
            "speculators_config.proposal_methods[0].speculative_tokens is no whole number",
            "vLLM takes the draft length from there", EXPORT,
        )  # fmt: skip
    verifier: Any = said.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        yield Finding("speculators_config.verifier.name_or_path is not given", "vLLM requires it", EXPORT)
    elif Path(name).is_absolute() or name.startswith((".", "~")) or (len(name) < 200 and Path(name).exists()):
        yield Finding(
            f"speculators_config.verifier.name_or_path is the local path {Path(name).name}",
            "vLLM refuses to serve the draft by its own name", "write the target's Hub id",
        )  # fmt: skip
    if "norm_before_residual" not in folder.config:
        yield Finding(
            "norm_before_residual is not written", "vLLM takes that for true, which is another computation",
            "write what the draft was trained with; ours is false",
        )  # fmt: skip
    if "model_type" not in folder.mapping("transformer_layer_config"):
        yield Finding("transformer_layer_config has no model_type", "vLLM guesses the layer's class", "write llama")


def _layer(folder: DraftFolder, found: FeatureConfig) -> Iterator[Finding]:
    config, body = folder.config, found.body
    names = config.get("architectures") or []
    if "speculators" not in found.forms and FEATURE_DRAFT not in names:
        yield Finding(
            f"architectures is {names}", f"SGLang and this decoder know such a draft as {FEATURE_DRAFT}",
            f"write {FEATURE_DRAFT}",
        )  # fmt: skip
    if body["num_hidden_layers"] != 1:
        yield Finding(
            f"{body['num_hidden_layers']} layers", "The engines norm the input of later layers by different names",
            "train one layer",
        )  # fmt: skip
    if "norm_before_residual" in found.toggles:
        yield Finding(
            "norm_before_residual is true", "SGLang and this decoder compute the draft as if it were false",
            "serve it with vLLM only, or train one without", engine="sglang",
        )  # fmt: skip
    if "attention_bias" in found.toggles:
        yield Finding("attention_bias is true", "SGLang leaves those biases out", "train without them", engine="sglang")
    if found.rope_base is None:
        yield Finding(
            "no RoPE base (rope_theta)", "Engines take 10000, and acceptance falls with the position",
            "write the base it was trained with, in rope_theta and in rope_parameters",
        )  # fmt: skip
    for key, default in (("max_position_embeddings", "2048"), ("rms_norm_eps", "1e-6")):
        if body.get(key) is None:
            yield Finding(f"{key} is not written", f"transformers takes {default}", "write the target's")
    if "flat" in found.forms and SIZE not in config:
        yield Finding(f"{SIZE} is not written", "SGLang asks for it at once", "write the head's rows", engine="sglang")
    if found.head_rows is not None and not 0 < found.head_rows <= found.vocabulary:
        yield Finding(f"{SIZE} is {found.head_rows} of {found.vocabulary} ids", "No map leads there", EXPORT)
    if set(found.forms) == {"flat", "speculators"}:
        keys = [key for key in body if key in config and key != "architectures"]
        differing = sorted(key for key in keys if config[key] != body[key])
        if differing:
            yield Finding(
                f"transformer_layer_config and the fields around it differ ({', '.join(differing)})",
                "vLLM reads the one, SGLang the other", EXPORT,
            )  # fmt: skip


def _taps(found: FeatureConfig) -> Iterator[Finding]:
    if found.all_taps is None:
        yield note(
            f"{TAPS} is not written", f"Engines read layers {DEFAULT_TAPS}: right only if it was trained so",
            "write the layers, for vLLM at the top, for SGLang one less in eagle_config",
        )  # fmt: skip
        return
    if found.taps is None:
        yield Finding(
            f"only eagle_config has {TAPS}", f"vLLM's V2 runner does not look there and reads {DEFAULT_TAPS}",
            "write them, one more each, at the top too", engine="vllm",
        )  # fmt: skip
    elif found.sglang_taps is None and "flat" in found.forms:
        yield Finding(
            f"eagle_config has no {TAPS}", f"SGLang reads the target's layers {DEFAULT_TAPS}",
            "write them, one less each, into eagle_config", engine="sglang",
        )  # fmt: skip
    elif found.sglang_taps is not None and tuple(tap + 1 for tap in found.sglang_taps) != found.taps:
        yield Finding(
            f"the top names layers {list(found.taps)}, eagle_config {list(found.sglang_taps)}",
            "SGLang counts from one layer later, so its numbers are one less: one of the engines reads other layers",
            f"write {[tap - 1 for tap in found.taps]} into eagle_config, if the top is right",
        )  # fmt: skip
    number = found.body.get("num_aux_hidden_states")
    if len(found.all_taps) != 3 and number != len(found.all_taps):
        yield Finding(
            f"{len(found.all_taps)} tapped layers, num_aux_hidden_states is {number}",
            "vLLM's Llama draft takes three and stops at the shape of fc",
            f"write num_aux_hidden_states {len(found.all_taps)} beside the layer's other fields", engine="vllm",
        )  # fmt: skip


def _tensors(folder: DraftFolder, found: FeatureConfig) -> Iterator[Finding]:
    prefixed = [name for name in folder.headers if name.startswith("model.")]
    if prefixed:
        yield Finding(
            f"{len(prefixed)} names begin with model. ({prefixed[0]})",
            "Engines add that themselves, and find none of them", "remove the prefix",
        )  # fmt: skip
    names = {layer_name(name.removeprefix("model.")): header for name, header in folder.headers.items()}
    expected = {name: shape for name, shape in tensor_shapes(found).items() if name not in OPTIONAL}
    if "embed_tokens.weight" in names:
        expected["embed_tokens.weight"] = (found.vocabulary, int(found.body["hidden_size"]))
    elif found.target_width != found.body["hidden_size"]:
        yield Finding(
            f"no embed_tokens.weight, and the target is {found.target_width} wide", "The target's do not fit", EXPORT
        )
    ours: dict[str, Header] = {
        name: header for name, header in names.items() if name not in ("t2d", "d2t") and not name.endswith(BUFFERS)
    }
    yield from compare_tensors(ours, expected, EXPORT)


def _map(folder: DraftFolder, found: FeatureConfig) -> Iterator[Finding]:
    rows, held = found.head_rows or found.vocabulary, folder.headers.keys() & {"d2t", "t2d"}
    if rows >= found.vocabulary:
        if held:
            yield Finding(
                "a vocabulary map beside a head over the whole vocabulary", "It costs a lookup at each token",
                "remove d2t and t2d",
            )  # fmt: skip
        return
    if "d2t" not in held:
        yield Finding(
            f"the head has {rows} of {found.vocabulary} rows and no d2t beside it",
            "Engines propose row i as the target's id i, and acceptance collapses in silence",
            "put the map into the weights as the tensor d2t: target id minus row, int64",
        )  # fmt: skip
        return
    offsets = folder.tensor("d2t")
    if tuple(offsets.shape) != (rows,) or offsets.dtype != torch.int64:
        yield Finding(
            f"d2t is {list(offsets.shape)} of {offsets.dtype}, expected {[rows]} of int64",
            "Engines cannot use it",
            EXPORT,
        )
        return
    yield from _map_values(folder, found, offsets.long())


def _map_values(folder: DraftFolder, found: FeatureConfig, offsets: Tensor) -> Iterator[Finding]:
    ids = offsets + torch.arange(len(offsets))
    t2d = folder.tensor("t2d") if "t2d" in folder.headers else None
    if t2d is not None and tuple(t2d.shape) != (found.vocabulary,):
        yield Finding(f"t2d is {list(t2d.shape)}, expected {[found.vocabulary]}", "The map is another's", EXPORT)
        return
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    sane = bool(((ids >= 0) & (ids < found.vocabulary)).all()) and bool((ids.diff() > 0).all())
    says = "Engines propose other tokens than the draft means"
    if marked is not None and torch.equal(marked, offsets) and not torch.equal(marked, ids):
        yield Finding("d2t holds the target's ids themselves", says, "store target id minus row")
    elif not sane:
        yield Finding(f"d2t does not lead to different ids under {found.vocabulary} in ascending order", says, EXPORT)
    elif not bool(offsets.any()) and (marked is None or not torch.equal(marked, ids)):
        yield Finding("d2t is all zero, so row i means id i", says, "write the map that the draft was trained with")
    elif marked is None:
        yield Finding("no t2d beside d2t", "Nothing shows that the map is this draft's", EXPORT)
    elif not torch.equal(marked, ids):
        yield Finding("d2t and t2d do not name the same ids", "One of them is of another run", EXPORT)
    said = folder.block.get("vocabulary_map_hash")
    if sane and said and said != map_fingerprint(ids):
        yield Finding(
            f"the map inside ({map_fingerprint(ids)}) is not the one that config.json names ({said})",
            "A map of the right size from another run points every row elsewhere", RETRAIN,
        )  # fmt: skip
