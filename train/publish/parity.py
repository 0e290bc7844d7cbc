"""Is an exported draft, read by the engine's rules, the draft that was trained?

Nothing of ours that wrote the export is used to read it: a feature draft is rebuilt from the fields and tensor names
that the engine looks at, a plain one by transformers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from configs.errors import UserError
from decode.chat import render_prompt
from decode.drafts.eagle3_model import LlamaForCausalLMEagle3, unroll
from decode.drafts.feature_config import TAPS
from decode.drafts.head import SIZE, head_ids, layer_name
from decode.encoder_decoder import EncoderDecoder
from decode.models import load_model, load_tokenizer
from eval.suites import read_suite
from train.publish.engine_forms import read_feature_config

POSITIONS, STEPS = 24, 3
CLOSE = 1e-4  # of float32 logits computed by the same operations


def read_as_engine(folder: Path, engine: str) -> LlamaForCausalLMEagle3:
    """The feature draft that `engine` sees in a folder, in float32, with `taps` as transformers counts them.

    Raises UserError when the engine would not find what it needs.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = read_feature_config(config)
    needed = {"vllm": ("flat", "speculators"), "sglang": ("flat",)}[engine]
    if found is None or not set(needed) & set(found.forms):
        raise UserError(f"{folder}: no config.json of a feature draft in a form that {engine} reads")
    for_vllm = engine == "vllm" and "speculators" in found.forms
    body = found.body if for_vllm else config
    taps = found.sglang_taps if engine == "sglang" else found.taps
    taps = tuple(tap + 1 for tap in taps) if taps and engine == "sglang" else taps
    if not taps:
        raise UserError(f"{folder}: no {TAPS} where {engine} looks for them")
    if for_vllm and config.get("norm_before_residual") is not False:
        raise UserError(f"{folder}: norm_before_residual is not false, so vLLM would compute another draft")
    layer = LlamaConfig(**{key: value for key, value in body.items() if key not in ("architectures", "model_type")})
    layer.target_hidden_size = found.target_width
    setattr(layer, TAPS, list(taps))
    setattr(layer, SIZE, found.head_rows or found.vocabulary)
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    tensors = {layer_name(name): tensor for shard in shards for name, tensor in shard.items()}
    model = LlamaForCausalLMEagle3(layer).float()
    try:
        model.load_state_dict({name: t for name, t in tensors.items() if name != "embed_tokens.weight"})
    except RuntimeError as error:
        raise UserError(f"{folder}: {str(error).splitlines()[-1].strip()}") from None
    return model.eval()


@torch.no_grad()
def feature_gap(
    one: LlamaForCausalLMEagle3, other: LlamaForCausalLMEagle3, embedded: Tensor, hidden: Tensor, hidden_other: Tensor
) -> float:
    """Largest |difference| of the logits over the target's ids, three drafted tokens deep; inf for other ids.

    embedded [1, T, E] of both; hidden [1, T, n·E], of the target's layers that each of them taps.
    """
    same_ids = (one.draft_ids is None) == (other.draft_ids is None) and (
        one.draft_ids is None or torch.equal(one.draft_ids, other.draft_ids)  # type: ignore[arg-type]
    )
    if not same_ids or hidden.shape != hidden_other.shape:
        return torch.inf
    positions = torch.arange(embedded.shape[1]).unsqueeze(0)
    logits = [
        torch.stack([model.logits(out) for out in unroll(model, embedded, model.fc(read), positions, STEPS)])
        for model, read in ((one, hidden), (other, hidden_other))
    ]
    return float((logits[0] - logits[1]).abs().max())


def check_feature_export(trained: LlamaForCausalLMEagle3, folder: Path, engine: str) -> None:
    """Raises UserError when `engine` would see another draft in `folder` than `trained` (float32)."""
    seen = read_as_engine(folder, engine)
    features = trained.fc.in_features
    generator = torch.Generator().manual_seed(0)
    embedded = torch.randn(1, POSITIONS, trained.config.hidden_size, generator=generator)
    hidden = torch.randn(1, POSITIONS, features, generator=generator)
    gap = feature_gap(trained.eval(), seen, embedded, hidden, hidden)
    if seen.taps != trained.taps or not gap <= CLOSE:
        raise UserError(
            f"{folder.name}: read as {engine} reads it, its logits differ from the trained draft's by {gap}"
        )


@torch.no_grad()
def plain_gap(trained: Any, folder: Path, ids: Tensor) -> float:
    """Largest |difference| between the logits of `trained` (float32) and of transformers' own reading of `folder`.

    ids [1, T]. Compared are the target's ids that `trained` has a row for.
    """
    exported = load_model(str(folder), "float32", "cpu").model
    kept, ours, theirs = head_ids(trained), trained(ids).logits, exported(ids).logits
    if kept is None:
        rows = min(ours.shape[-1], theirs.shape[-1])
        return float((ours[..., :rows] - theirs[..., :rows]).abs().max())
    return float((ours - theirs[..., kept]).abs().max())


def check_plain_export(trained: Any, folder: Path) -> None:
    """Raises UserError when transformers' own reading of `folder` gives other logits than `trained` (float32)."""
    some = min(int(trained.config.vocab_size), len(load_tokenizer(str(folder))))
    ids = torch.randint(some, (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    if isinstance(trained, EncoderDecoder):
        ids[:, POSITIONS // 2] = trained.source_end
    gap = plain_gap(trained, folder, ids)
    if not gap <= CLOSE:
        raise UserError(f"{folder.name}: its logits differ from the trained draft's by {gap}")


@torch.no_grad()
def share_of_rows(model: Any, tokenizer: Any, rows: Tensor) -> tuple[float, float]:
    """Mean probability of the ids that `rows` [V] marks, and the share of places where one of them comes first.

    Over the prompts of the suite, one of each category, as the chat template renders them.
    """
    first = {prompt.category: prompt for prompt in reversed(read_suite("suite"))}
    mass, chosen, places = 0.0, 0, 0
    for prompt in first.values():
        logits = model(torch.tensor([_encoded(tokenizer, prompt.messages)])).logits[0].float()
        mass += float(logits.softmax(-1)[:, rows].sum())
        chosen += int(rows[logits.argmax(-1)].sum())
        places += len(logits)
    return mass / places, chosen / places


def _encoded(tokenizer: Any, messages: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        return render_prompt(tokenizer, messages)
    return list(tokenizer(messages[-1]["content"]).input_ids)
