"""Checks of a draft that is a causal language model of its own."""

import copy
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.drafts.head import SIZE
from train.publish.file_checks import RETRAIN
from train.publish.findings import DraftFolder, Finding, compare_tensors, note

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def plain_checks(folder: DraftFolder) -> Iterator[Finding]:
    """What an engine, or transformers, would stumble over."""
    config = folder.config
    names = config.get("architectures") or []
    if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        yield Finding(
            f"architectures is {names}", "Engines choose the model's class by it, and know none of that name",
            "write the class that it was trained as, e.g. LlamaForCausalLM",
        )  # fmt: skip
    expected = _expected(folder)
    if expected is None:
        yield Finding(
            f"model_type {config.get('model_type')!r} with these fields makes no causal language model",
            "transformers cannot build it", RETRAIN,
        )  # fmt: skip
        return
    tied = bool(config.get("tie_word_embeddings", expected.tied_by_default))
    shapes, found = dict(expected.shapes), folder.headers
    trimmed = config.get(SIZE)
    if trimmed and HEAD in shapes:
        shapes[HEAD] = (int(trimmed), shapes[HEAD][1])
        shapes["draft_ids"] = (int(trimmed),)
        yield note(
            f"the head has {trimmed} of {config.get('vocab_size')} rows", "Only draftsmith decodes with it",
            "draftsmith export writes the whole head for engines",
        )  # fmt: skip
    if tied and HEAD not in found:
        shapes.pop(HEAD, None)
    yield from compare_tensors(found, shapes, RETRAIN)
    if tied and {HEAD, TABLE} <= found.keys() and not torch.equal(folder.tensor(HEAD), folder.tensor(TABLE)):
        yield Finding(
            "tie_word_embeddings is true, but head and embeddings differ",
            "A loader ties them, and the trained head is lost", "write tie_word_embeddings false",
        )  # fmt: skip


class _Expected:
    def __init__(self, shapes: dict[str, tuple[int, ...]], tied_by_default: bool) -> None:
        self.shapes, self.tied_by_default = shapes, tied_by_default


def _expected(folder: DraftFolder) -> _Expected | None:
    """Names and shapes that transformers' own class has; None where there is no such class."""
    said = {key: value for key, value in folder.config.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(str(folder.config.get("model_type")), **copy.deepcopy(said))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # whatever a class makes of fields that it does not expect
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return _Expected(shapes, bool(config.tie_word_embeddings))
