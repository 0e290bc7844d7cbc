"""Checks of a draft folder against its target, and of an exported one against the draft that was trained."""

from collections.abc import Iterator
from typing import Any

import torch

from configs.errors import UserError
from decode.chat import render_prompt, template_fingerprint
from decode.drafts.head import is_feature_draft
from decode.drafts.kinds import load_feature_weights
from decode.models import Loaded, load_model, load_tokenizer, read_model_config
from train.publish.engine_forms import FeatureConfig
from train.publish.file_checks import RETRAIN
from train.publish.findings import DraftFolder, Finding, note
from train.publish.parity import CLOSE, feature_gap, plain_gap, read_as_engine

SAID = [{"role": "user", "content": "Why is the sky blue, and why are sunsets red? Answer in three sentences."}]
ANOTHER = "use the draft with the target it was made for"


def target_checks(folder: DraftFolder, feature: FeatureConfig | None, target: Loaded) -> Iterator[Finding]:
    """Whether this draft's ids, features, positions and prompts are this target's."""
    config = target.model.config
    body = feature.body if feature else folder.config
    rows = body.get("vocab_size")
    if rows != config.vocab_size:
        yield Finding(
            f"vocab_size is {rows}, the target's {config.vocab_size}", "vLLM and SGLang compare the two and stop",
            "draftsmith export makes them equal" if feature is None else ANOTHER,
        )  # fmt: skip
    yield from _tokenizer(folder, target, needs_one=feature is None)
    yield from _identity(folder, target)
    context = body.get("max_position_embeddings")
    if isinstance(context, int) and context < target.context_tokens:
        yield Finding(
            f"max_position_embeddings is {context}, the target's {target.context_tokens}",
            "Engines stop, or draft noise, past it", "draftsmith export" if feature else "train it with the target's",
        )  # fmt: skip
    if feature is not None:
        yield from _features(feature, config)


def _tokenizer(folder: DraftFolder, target: Loaded, needs_one: bool) -> Iterator[Finding]:
    try:
        theirs = load_tokenizer(str(folder.path)).get_vocab()
    except UserError:
        if not needs_one:
            yield note("no tokenizer", "Engines use the target's; nothing shows that it is the same", "copy its files")
        return
    ours = target.tokenizer.get_vocab()
    if theirs != ours:
        differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        yield Finding(
            f"its tokenizer is not the target's (first at id {differing[0][1]})",
            "The same id means other text in the two", ANOTHER,
        )  # fmt: skip


def _identity(folder: DraftFolder, target: Loaded) -> Iterator[Finding]:
    trained_with = folder.block.get("chat_template_hash")
    serves_with = template_fingerprint(target.tokenizer, target.template_arguments)
    if trained_with and trained_with != serves_with:
        yield Finding(
            f"trained with chat template {trained_with}, the target renders with {serves_with}",
            "It sees prompts unlike those it was trained on, and is right less often",
            "serve the template it was trained with, or bring the draft along with `draftsmith distill --init`",
        )  # fmt: skip
    revision = folder.block.get("target_revision")
    if revision and target.revision and revision != target.revision:
        yield note(
            f"trained for the target's revision {revision}, this is {target.revision}",
            "Acceptance with other weights is not known", "measure it with `draftsmith eval`",
        )  # fmt: skip


def _features(feature: FeatureConfig, config: Any) -> Iterator[Finding]:
    width = feature.target_width
    if width != config.hidden_size:
        yield Finding(
            f"reads hidden states of width {width}, the target's have {config.hidden_size}", "Engines stop", ANOTHER
        )
    deepest = max(feature.all_taps or (0,))
    if deepest > config.num_hidden_layers:
        yield Finding(
            f"reads the target's layer {deepest}, which has {config.num_hidden_layers}", "Engines stop", ANOTHER
        )
    theirs = getattr(config, "rope_parameters", None) or {}
    base, ours = theirs.get("rope_theta"), feature.body.get("rope_parameters") or {}
    why = "Unless it was trained so, acceptance falls with the position"
    if base is not None and feature.rope_base is not None and float(base) != float(feature.rope_base):
        yield Finding(f"RoPE base {feature.rope_base:g}, the target's is {base:g}", why, RETRAIN)
    kinds = [said.get("rope_type", "default") for said in (ours, theirs)]
    if ours and kinds[0] != kinds[1]:
        yield Finding(f"RoPE of type {kinds[0]}, the target's is {kinds[1]}", why, RETRAIN)


@torch.no_grad()
def parity_checks(
    folder: DraftFolder, feature: FeatureConfig | None, target: Loaded, trained: str
) -> Iterator[Finding]:
    """Logits of the folder, read by each engine's rules, against those of the draft `trained`, on the target's text.

    `target` has its weights, in float32.
    """
    ids = torch.tensor([render_prompt(target.tokenizer, SAID)])
    says, mend = (
        "The engine would run another draft than the measured one",
        "draftsmith export, from the trained folder",
    )
    config = read_model_config(trained)
    if is_feature_draft(config) != (feature is not None):
        yield Finding(f"{trained} is a draft of another kind", says, mend)
        return
    if feature is None:
        # In the dtype it is stored in, then widened: an adapter's sum is rounded once too.
        gap = plain_gap(load_model(trained, device="cpu").model.float(), folder.path, ids)
        if not gap <= CLOSE:
            yield Finding(f"its logits differ from those of {trained} by {gap:.3g}", says, mend)
        return
    one = load_feature_weights(trained, config, torch.float32, None)
    one = one.to(config.dtype or torch.float32).float().eval()
    states = target.model(ids, output_hidden_states=True).hidden_states
    embedded = target.model.get_input_embeddings()(ids)[:, 1:]
    engines = [("vllm", "speculators" in feature.forms), ("sglang", "flat" in feature.forms)]
    for engine in [name for name, is_its_form in engines if is_its_form]:
        try:
            other = read_as_engine(folder.path, engine)
        except UserError as error:
            yield Finding(str(error), says, mend)
            continue
        read = [torch.cat([states[tap][:, :-1] for tap in model.taps], dim=-1) for model in (one, other)]
        gap = feature_gap(one, other, embedded, read[0], read[1])
        if not gap <= CLOSE:
            yield Finding(
                f"read as {engine} reads it, its logits differ from those of {trained} by {gap:.3g}", says, mend
            )
