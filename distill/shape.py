"""A draft's kind and shape: the settings, the draft before training, and how it is trained and drafts."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from configs.errors import UserError
from configs.settings import StrictSettings
from decode.drafts.contract import Draft
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.head import head_ids, trim_head
from decode.drafts.lm import LMDraft
from decode.models import Loaded, check_pair, load_model
from distill.build import build_eagle3_draft, build_lm_draft, scratch_lm_draft
from distill.logit_cache import check_taps
from distill.rows import Row
from distill.students import Eagle3Student, LMStudent, Student
from distill.vocabulary import choose_ids, count_tokens, coverage, kept_always


class DraftSettings(StrictSettings):
    """The draft's kind and shape."""

    kind: Literal["lm", "eagle3"] = Field(
        "lm", description="lm: a causal LM of its own. eagle3: one layer that reads the target's hidden states."
    )
    init: str = Field(
        "target", description="lm: target (keep some layers of it), scratch (random weights), or a model to start from."
    )
    layers: tuple[int, ...] = Field(
        (0, -1), min_length=1, description="lm from the target: layers of it to keep; -1 is the last."
    )
    depth: int = Field(2, ge=1, description="lm from scratch: number of layers.")
    width: int = Field(256, ge=8, description="lm from scratch: hidden size, a multiple of the target's head size.")
    vocabulary: int = Field(0, ge=0, description="Ids in the draft's head: the most frequent in the answers; 0 is all.")
    taps: tuple[int, ...] = Field(
        (), description="eagle3: hidden states of the target to read, 0 the embeddings; none: early, middle and late."
    )
    unroll_steps: int = Field(3, ge=1, description="eagle3: drafted tokens of a round that training goes through.")

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        of_kind = {"lm": {"init", "layers", "depth", "width"}, "eagle3": {"taps", "unroll_steps"}}
        of_init = {"target": {"layers"}, "scratch": {"depth", "width"}}.get(self.init, set())
        used = {"init", *of_init} if self.kind == "lm" else of_kind["eagle3"]
        for name in set().union(*of_kind.values()) - used:
            if getattr(self, name) != type(self).model_fields[name].default:
                start = f" that starts from {self.init}" if self.kind == "lm" else ""
                raise ValueError(f"draft.{name} has no effect on a draft of kind {self.kind}{start}")
        return self


def chosen_taps(settings: DraftSettings, target: Any) -> tuple[int, ...]:
    """The hidden states that a draft of `settings` reads of a target with this transformers config; none for `lm`."""
    if settings.kind == "lm":
        return ()
    depth = target.num_hidden_layers
    return settings.taps or tuple(sorted({min(2, depth), depth // 2, depth - 1}))


def make_draft(settings: DraftSettings, target: Loaded, rows: Sequence[Row], seed: int) -> Any:
    """The draft before training; `rows` say which ids a trimmed head keeps, without rows it is the lowest ones.

    Raises UserError for what cannot be.
    """
    ids = None
    if settings.vocabulary:
        counts = count_tokens(rows, target.model.config.vocab_size)
        always = kept_always(target, counts)
        ids = choose_ids(counts, settings.vocabulary, always, len(target.tokenizer))
        if rows and os.environ.get("RANK", "0") == "0":
            told = f"the head keeps {len(ids)} ids: {coverage(counts, ids):.2%} of the supervised tokens"
            print(told, file=sys.stderr)
    if settings.kind == "eagle3":
        taps = chosen_taps(settings, target.model.config)
        check_taps(taps, target.model.config)
        return build_eagle3_draft(target.model, taps, ids, seed)
    draft = _lm_draft(settings, target, seed)
    if ids is not None:
        trim_head(draft, ids)
    return draft


def student_and_drafter(settings: DraftSettings, draft: Any, target: Loaded) -> tuple[Student, Draft[Any]]:
    """The draft as it trains, and as it drafts."""
    if settings.kind == "eagle3":
        embeddings = target.model.get_input_embeddings()
        return Eagle3Student(draft, settings.unroll_steps), Eagle3Draft(draft, embeddings)
    return LMStudent(draft), LMDraft(draft, int(target.model.config.vocab_size))


def _lm_draft(settings: DraftSettings, target: Loaded, seed: int) -> Any:
    if settings.init == "target":
        return build_lm_draft(target.model, settings.layers)
    if settings.init == "scratch":
        return scratch_lm_draft(target.model, settings.depth, settings.width, seed)
    start = load_model(settings.init, "float32", device="cpu")
    check_pair(target, start)
    if head_ids(start.model) is not None:
        raise UserError(f"draft.init {settings.init}: its head is trimmed already; start from a whole one")
    return start.model.requires_grad_()
