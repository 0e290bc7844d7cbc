"""A draft's kind and shape: the settings, the draft before training, and how it is trained and drafts."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from configs.errors import UserError
from configs.settings import StrictSettings
from decode.drafts.contract import Draft
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.feature_config import TAPS
from decode.drafts.head import SIZE, head_ids, is_feature_draft, trim_head
from decode.drafts.kinds import load_draft
from decode.drafts.lm import LMDraft
from decode.encoder_decoder import EncoderDecoder
from decode.models import Loaded, read_model_config
from distill.build import build_eagle3_draft, build_lm_draft, scratch_lm_draft
from distill.build_encoder_decoder import cut_encoder_decoder, scratch_encoder_decoder
from distill.logit_cache import check_taps
from distill.rows import Row
from distill.students import Eagle3Student, LMStudent, Student
from distill.vocabulary import choose_ids, count_tokens, coverage, kept_always
from train.lora import LoraSettings, add_lora


class DraftSettings(StrictSettings):
    """The draft's kind and shape."""

    kind: Literal["lm", "eagle3"] = Field(
        "lm", description="lm: a causal LM of its own. eagle3: one layer that reads the target's hidden states."
    )
    init: str = Field(
        "target",
        description="target (made from its layers), scratch (lm: random weights), or a draft or model to go on from.",
    )
    layers: tuple[int, ...] = Field(
        (0, -1), min_length=1, description="lm from the target: layers of it to keep; -1 is the last."
    )
    encoder_layers: tuple[int, ...] = Field(
        (), description="lm from an encoder–decoder target: layers of its encoder to keep; none named: all."
    )
    depth: int = Field(2, ge=1, description="lm from scratch: number of layers.")
    width: int = Field(256, ge=8, description="lm from scratch: hidden size, a multiple of the target's head size.")
    vocabulary: int = Field(0, ge=0, description="Ids in the draft's head: the most frequent in the answers; 0 is all.")
    taps: tuple[int, ...] = Field(
        (), description="eagle3: hidden states of the target to read, 0 the embeddings; none: early, middle and late."
    )
    unroll_steps: int = Field(3, ge=1, description="eagle3: drafted tokens of a round that training goes through.")

    lora: LoraSettings = LoraSettings()

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        of_kind = {"lm": {"layers", "encoder_layers", "depth", "width"}, "eagle3": {"taps", "unroll_steps"}}
        of_init = {"target": {"layers", "encoder_layers"}, "scratch": {"depth", "width"}}.get(self.init, set())
        used = of_init if self.kind == "lm" else of_kind["eagle3"]
        if self.kind == "eagle3" and self.init == "scratch":
            raise ValueError("draft.init=scratch is of kind lm; a feature draft starts from its target or from a draft")
        if self.lora.rank and self.init in ("target", "scratch"):
            raise ValueError(
                "draft.lora.rank adapts a draft that there is: name it with draft.init or --init; "
                "without one, train all of a new draft (draft.lora.rank=0)"
            )
        for name in set().union(*of_kind.values()) - used:
            if getattr(self, name) != type(self).model_fields[name].default:
                start = f" that starts from {self.init}" if self.kind == "lm" else ""
                raise ValueError(f"draft.{name} has no effect on a draft of kind {self.kind}{start}")
        return self


def warm_start(draft: str) -> list[str]:
    """Overrides that make a run go on from `draft`: a folder, a Hub id or an adapter. Raises UserError."""
    config = read_model_config(draft)
    kind = "eagle3" if is_feature_draft(config) else "lm"
    rows = getattr(config, SIZE, 0) or 0
    rows = 0 if rows == config.vocab_size else rows
    found = [f"draft.init={json.dumps(draft)}", f"draft.kind={kind}", f"draft.vocabulary={rows}"]
    if kind == "eagle3":
        found.append(f"draft.taps={list(getattr(config, TAPS))}")
    unused = ("layers", "encoder_layers", "depth", "width", *(("taps", "unroll_steps") if kind == "lm" else ()))
    defaults = {name: DraftSettings.model_fields[name].default for name in unused}
    return [*found, *(f"draft.{name}={json.dumps(value)}" for name, value in defaults.items())]


def chosen_taps(settings: DraftSettings, target: Any) -> tuple[int, ...]:
    """The hidden states that a draft of `settings` reads of a target with this transformers config; none for `lm`."""
    if settings.kind == "lm":
        return ()
    if settings.init != "target":
        return tuple(getattr(read_model_config(settings.init), TAPS, ()))
    depth = target.num_hidden_layers
    return settings.taps or tuple(sorted({min(2, depth), depth // 2, depth - 1}))


def make_draft(settings: DraftSettings, target: Loaded, rows: Sequence[Row], seed: int) -> Any:
    """The draft before training; `rows` say which ids a trimmed head keeps, without rows it is the lowest ones.

    Raises UserError for what cannot be.
    """
    _check_encoder(settings, target)
    if settings.init not in ("target", "scratch"):
        return _started_from(settings, target, rows, seed)
    ids = _chosen_ids(settings, target, rows)
    if settings.kind == "eagle3":
        taps = chosen_taps(settings, target.model.config)
        check_taps(taps, target.model.config)
        return build_eagle3_draft(target.model, taps, ids, seed)
    draft = _lm_draft(settings, target, seed)
    if ids is not None:
        trim_head(draft, ids)
    return draft


def _check_encoder(settings: DraftSettings, target: Loaded) -> None:
    """Raises UserError for what only a causal, or only an encoder–decoder target has."""
    if target.model.config.is_encoder_decoder:
        asked = {"draft.vocabulary": settings.vocabulary, "draft.lora.rank": settings.lora.rank}
        if settings.kind != "lm" or any(asked.values()):
            what = ", ".join(name for name, value in asked.items() if value) or f"draft.kind {settings.kind}"
            raise UserError(f"{what}: not for an encoder–decoder target, whose draft is a whole lm of its own")
    elif settings.encoder_layers:
        raise UserError(f"draft.encoder_layers has no effect: {target.name} has no encoder; leave it out")


def _chosen_ids(settings: DraftSettings, target: Loaded, rows: Sequence[Row]) -> Tensor | None:
    """What a trimmed head keeps; None for a whole one."""
    ids = None
    if settings.vocabulary:
        counts = count_tokens(rows, target.model.config.vocab_size)
        always = kept_always(target, counts)
        ids = choose_ids(counts, settings.vocabulary, always, len(target.tokenizer))
        if rows and os.environ.get("RANK", "0") == "0":
            told = f"the head keeps {len(ids)} ids: {coverage(counts, ids):.2%} of the supervised tokens"
            print(told, file=sys.stderr)
    return ids


def _started_from(settings: DraftSettings, target: Loaded, rows: Sequence[Row], seed: int) -> Any:
    """The weights of another draft, or of any model with the same tokenizer, to go on from."""
    init, config = settings.init, read_model_config(settings.init)
    kind = "eagle3" if is_feature_draft(config) else "lm"
    if kind != settings.kind:
        raise UserError(f"draft.init {init}: is of kind {kind}, and draft.kind is {settings.kind}; make them agree")
    draft = load_draft(target, init, "float32", device="cpu").model.requires_grad_()
    ids, taps = head_ids(draft), draft.taps if kind == "eagle3" else ()
    if settings.taps not in ((), taps):
        raise UserError(f"draft.init {init}: reads hidden states {list(taps)}; leave draft.taps out, or set it so")
    if ids is None and settings.vocabulary and kind == "lm":
        if settings.lora.rank:
            raise UserError(
                f"draft.init {init}: its head is whole, and an adapter cannot trim it; leave draft.vocabulary out"
            )
        chosen = _chosen_ids(settings, target, rows)
        assert chosen is not None
        trim_head(draft, chosen)
    elif settings.vocabulary not in (0, _head_rows(draft)):
        raise UserError(
            f"draft.init {init}: its head has {_head_rows(draft)} ids, and draft.vocabulary is {settings.vocabulary}; "
            f"leave it out, or set {_head_rows(draft)}"
        )
    if settings.lora.rank:
        add_lora(draft, settings.lora, init, seed)
    return draft


def _head_rows(draft: Any) -> int:
    return len(draft.get_output_embeddings().weight)


def make_student(settings: DraftSettings, draft: Any) -> Student:
    """The draft as it trains."""
    return Eagle3Student(draft, settings.unroll_steps) if settings.kind == "eagle3" else LMStudent(draft)


def make_drafter(settings: DraftSettings, draft: Any, target: Loaded) -> Draft[Any]:
    """The draft as it drafts."""
    if settings.kind == "eagle3":
        return Eagle3Draft(draft, target.model.get_input_embeddings())
    return LMDraft(draft, int(target.model.config.vocab_size))


def _lm_draft(settings: DraftSettings, target: Loaded, seed: int) -> Any:
    if isinstance(target.model, EncoderDecoder):
        if settings.init == "target":
            return cut_encoder_decoder(target.model, settings.layers, settings.encoder_layers)
        return scratch_encoder_decoder(target.model, settings.depth, settings.width, seed)
    if settings.init == "target":
        return build_lm_draft(target.model, settings.layers)
    return scratch_lm_draft(target.model, settings.depth, settings.width, seed)
