"""Chat rendering with the target's own template: prompt ids, supervised spans, fingerprints."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from configs.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class Rendered:
    """A chat as token ids, and for each whether it is part of an assistant's answer (end-of-turn included)."""

    ids: list[int]
    is_answer: list[bool]


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids that ask the model for its next answer. A tokenizer without a template gets the plain text.

    Raises UserError with the template's own words when it refuses the messages.
    """
    if not tokenizer.chat_template:
        text = "\n\n".join(message["content"] for message in messages)
        return list(tokenizer(text).input_ids)
    return encode_text(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> Rendered:
    """Token ids of a whole chat with every assistant answer marked.

    The boundaries come from rendering with and without each answer, never from a search for marker text. A mark
    ends with the end-of-turn token where the template writes one. Raises UserError when no turn is an answer or
    the template rewrites earlier turns, so that no boundary can be found.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("no assistant turn: nothing to learn from")
    text = _render(tokenizer, messages)
    spans = [
        _answer_span(tokenizer, messages, turn, text)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    marks = [
        any(start <= begin and end <= stop for start, stop in spans) and begin < end
        for begin, end in encoded.offset_mapping
    ]
    return Rendered(list(encoded.input_ids), marks)


def template_fingerprint(tokenizer: Any) -> str:
    """16 hex digits of the chat template, or 'none'."""
    template = tokenizer.chat_template
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"


def user_turn_opening(tokenizer: Any) -> str:
    """What the template writes before the text of a first user turn.

    Found by rendering two different texts and keeping what comes before the difference. Raises UserError without a
    template: there is no turn to open.
    """
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template to write user turns with; give prompts instead")
    one, other = (_render(tokenizer, [{"role": "user", "content": text}]) for text in ("A", "B"))
    start = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return one[:start]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that already carries its special tokens: none is added, so a begin token never comes twice."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _answer_span(tokenizer: Any, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
    before = _render(tokenizer, messages[:turn], add_generation_prompt=True)
    through = _render(tokenizer, messages[: turn + 1])
    if not (through.startswith(before) and text.startswith(through)):
        raise UserError(
            f"turn {turn + 1}: the chat template rewrites earlier turns when later ones are added, "
            "so the answer's boundaries cannot be found"
        )
    answer = through[len(before) :]
    stop = tokenizer.eos_token
    at = answer.rfind(stop) if stop else -1
    return len(before), len(before) + (at + len(stop) if at >= 0 else len(answer))


def _render(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"the chat template refuses the messages: {str(error).splitlines()[0]}") from error
