"""Whether a draft's ids mean what its target's ids mean."""

import warnings

from configs.errors import UserError
from decode.chat import template_fingerprint
from decode.encoder_decoder import source_end
from decode.models import Loaded


def check_pair(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft whose ids do not mean what the target's ids mean.

    Rows beyond the tokenizer (padding of the vocabulary) may differ in number; another end token, or another chat
    template than the draft was trained with, is warned about.
    Raises UserError naming the first id that differs, or the sizes when real tokens are missing.
    """
    if target.model.config.is_encoder_decoder != draft.model.config.is_encoder_decoder:
        which = "target" if target.model.config.is_encoder_decoder else "draft"
        raise UserError(
            f"draft {draft.name} and target {target.name}: only the {which} is an encoder–decoder model, and the two "
            "must read a prompt alike; use a draft made for this target"
        )
    if target.model.config.is_encoder_decoder:
        ends = [source_end(one.model.config) for one in (draft, target)]
        if ends[0] != ends[1]:
            raise UserError(
                f"draft {draft.name} ends a source with id {ends[0]}, target {target.name} with {ends[1]} "
                "(eos_token_id): use a draft made for this target"
            )
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        by_id = {i: token for token, i in theirs.items()}
        differing = next(
            (i for token, i in sorted(ours.items(), key=lambda item: item[1]) if by_id.get(i) != token), None
        )
        example = f"; first difference: id {differing}" if differing is not None else ""
        raise UserError(
            f"draft {draft.name} and target {target.name} have different tokenizers "
            f"({len(theirs)} and {len(ours)} entries{example}); use a draft made for this target"
        )
    sizes = draft.model.config.vocab_size, target.model.config.vocab_size
    if min(sizes) < len(ours):
        raise UserError(
            f"draft {draft.name} has {sizes[0]} vocabulary rows and target {target.name} {sizes[1]}, but their "
            f"tokenizer has {len(ours)} entries: real tokens are missing; rebuild the draft from this target"
        )
    trained_with = (getattr(draft.model.config, "draftsmith", None) or {}).get("chat_template_hash")
    serves_with = template_fingerprint(target.tokenizer, target.template_arguments)
    if trained_with and trained_with != serves_with:
        warnings.warn(
            f"draft {draft.name} was trained with chat template {trained_with}, target {target.name} renders with "
            f"{serves_with}: it may be right less often (other template arguments?)",
            stacklevel=2,
        )
    if draft.eos_ids != target.eos_ids:
        warnings.warn(
            f"draft {draft.name} ends at ids {draft.eos_ids}, target {target.name} at {target.eos_ids}: "
            "the target's rule counts",
            stacklevel=2,
        )
