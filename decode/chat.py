"""Chat rendering with the target's own template: prompt ids, supervised spans, fingerprints."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from configs.errors import UserError
from decode.conversations import Message

Arguments = Mapping[str, Any]  # of the template, e.g. enable_thinking=False
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A chat as token ids, and for each whether it is part of an assistant's answer (end-of-turn included)."""

    ids: list[int]
    is_answer: list[bool]


def render_prompt(tokenizer: Any, messages: Sequence[Message], arguments: Arguments | None = None) -> list[int]:
    """Token ids that ask the model for its next answer. A tokenizer without a template gets the plain text.

    Raises UserError with the template's own words when it refuses the messages.
    """
    if not tokenizer.chat_template:
        _refuse_arguments(arguments)
        return _plain_prompt(tokenizer, messages)

    def render(changed: Sequence[Message]) -> str:
        return _render(tokenizer, changed, arguments, add_generation_prompt=True)

    text = render(messages)
    return [token for token, _ in _encode(tokenizer, text, _look_alikes(tokenizer, messages, render, text))]


def render_chat(
    tokenizer: Any, messages: Sequence[Message], arguments: Arguments | None = None, last_only: bool = False
) -> Rendered:
    """Token ids of a whole chat with every assistant answer marked, or the last turn's alone.

    Where the template has generation marks, they decide. Else the boundaries come from rendering with and without
    each answer, never from a search for marker text, and a mark ends with the end-of-turn token where the template
    writes one. An opening assistant turn answers nothing and is not marked. Without a template the chat is one prompt
    and its completion, with an end token. Raises UserError when no turn is an answer, when a boundary cannot be found,
    and with the template's own words when it refuses the messages.
    """
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn > 0]
    answers = [turn for turn in answers if any(message["role"] != "system" for message in messages[:turn])]
    if not answers:
        raise UserError("no assistant turn: nothing to learn from")
    if not tokenizer.chat_template:
        _refuse_arguments(arguments)
        return _plain_pair(tokenizer, messages, answers)

    def render(changed: Sequence[Message]) -> str:
        return _render(tokenizer, changed, arguments)

    text = render(messages)
    marked = _marked_spans(tokenizer, messages, arguments)
    all_turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if marked is not None and len(marked) == len(all_turns):
        spans = [span for turn, span in zip(all_turns, marked, strict=True) if turn in answers]
    else:
        spans = [_answer_span(tokenizer, messages, arguments, turn, text) for turn in answers]
    spans = spans[-1:] if last_only else spans
    encoded = _encode(tokenizer, text, _look_alikes(tokenizer, messages, render, text))
    marks = [any(start <= a and b <= stop for start, stop in spans) and a < b for _, (a, b) in encoded]
    return Rendered([token for token, _ in encoded], marks)


def template_fingerprint(tokenizer: Any, arguments: Arguments | None = None) -> str:
    """16 hex digits of the chat template and its arguments, or 'none'."""
    template = tokenizer.chat_template
    said = str(template) + (json.dumps(dict(arguments), sort_keys=True) if arguments else "")
    return hashlib.sha256(said.encode()).hexdigest()[:16] if template else "none"


def user_turn_opening(tokenizer: Any, arguments: Arguments | None = None) -> str:
    """What the template writes before the text of a first user turn.

    Found by rendering two different texts and keeping what comes before the difference. Raises UserError without a
    template: there is no turn to open.
    """
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template to write user turns with; give prompts instead")
    one, other = (_render(tokenizer, [{"role": "user", "content": text}], arguments) for text in ("A", "B"))
    start = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return one[:start]


def user_turn(tokenizer: Any, text: str, arguments: Arguments | None = None) -> str:
    """A chat of this one user turn, as the template renders it, without an opened answer."""
    return _render(tokenizer, [{"role": "user", "content": text}], arguments)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that already carries its special tokens: none is added, so a begin token never comes twice."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _plain_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The contents one after the other, with the special tokens that the tokenizer adds to a text."""
    _refuse_calls(messages)
    return _plain_ids(tokenizer, "\n\n".join(message["content"] for message in messages), True)


def _plain_pair(tokenizer: Any, messages: Sequence[Message], answers: Sequence[int]) -> Rendered:
    if answers != [len(messages) - 1]:
        said = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"this model has no chat template, so a row is one prompt and, last, one completion; got turns of {said}"
        )
    _refuse_calls(messages)
    prompt = _plain_prompt(tokenizer, messages[:-1])
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    completion = _plain_ids(tokenizer, messages[-1]["content"], False) + end
    return Rendered(prompt + completion, [False] * len(prompt) + [True] * len(completion))


def _plain_ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Where an end token follows the text, one that the text quotes is text: it must not end it."""
    encoded = _with_specials(tokenizer, add_special_tokens)
    ids, end, mark = encoded(text), tokenizer.eos_token_id, str(tokenizer.eos_token)
    specials = encoded("")
    added = specials.count(end)
    if end is None or (add_special_tokens and not added) or ids.count(end) == added:
        return ids
    body = _with_specials(tokenizer, False)
    # In two pieces it is not the token, whatever the tokenizer's model makes of the whole.
    pieces = re.split(f"(?<={re.escape(mark[:1])})(?={re.escape(mark[1:])})", text)
    ids = [*specials[:-1], *(token for piece in pieces for token in body(piece)), *specials[-1:]]
    if ids.count(end) != added:
        raise UserError(f"a text that quotes the end token {mark!r}, which this tokenizer cannot tell from the token")
    return ids


def _with_specials(tokenizer: Any, add_special_tokens: bool) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def _refuse_arguments(arguments: Arguments | None) -> None:
    if arguments:
        raise UserError(f"{', '.join(arguments)}: no effect on a model without a chat template; leave it out")


def _refuse_calls(messages: Sequence[Message]) -> None:
    if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        raise UserError("this model has no chat template, so tool calls cannot be rendered")


def _answer_span(
    tokenizer: Any, messages: Sequence[Message], arguments: Arguments | None, turn: int, text: str
) -> Span:
    """From where the generation prompt ends to the end-of-turn mark, with the blanks and tool calls before it."""
    before = _render(tokenizer, messages[:turn], arguments, add_generation_prompt=True)
    content = _content_span(messages, turn, lambda changed: _render(tokenizer, changed, arguments), text)
    start = len(before) if text.startswith(before) else content and content[0]
    through = _render(tokenizer, messages[: turn + 1], arguments)
    whole = len(through.rstrip()) if text.startswith(through) else None  # all that this turn adds to the chat
    mark = None
    if content is not None and not messages[turn].get("tool_calls"):
        after = len(text) - len(text[content[1] :].lstrip())
        mark = next((after + len(token) for token in _special_tokens(tokenizer) if text.startswith(token, after)), None)
    end = mark or max((place for place in (whole, content and content[1]) if place is not None), default=None)
    if start is None or end is None or end < start:
        raise UserError(f"turn {turn + 1}: the chat template does not show where this answer begins and ends")
    return start, end


def _content_span(
    messages: Sequence[Message], turn: int, render: Callable[[Sequence[Message]], str], text: str
) -> Span | None:
    """Where the content of one message stands in the rendered text: what changes when the content does."""
    content = messages[turn]["content"]
    if not content.strip():
        return None
    stranger = next(c for c in ("\ue000", "\ue001", "\ue002") if c not in (content.strip()[0], content.strip()[-1]))
    other = render([*messages[:turn], {**messages[turn], "content": stranger * 3}, *messages[turn + 1 :]])
    if other == text or stranger not in other:
        return None  # the template leaves this content out
    start = _shared_length(text, other)
    return start, len(text) - _shared_length(text[start:][::-1], other[start:][::-1])


def _shared_length(one: str, other: str) -> int:
    """How many characters the two begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _marked_spans(tokenizer: Any, messages: Sequence[Message], arguments: Arguments | None) -> list[Span] | None:
    """The spans inside the template's generation marks; None when it has none."""
    template = tokenizer.get_chat_template()
    if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    _, spans = render_jinja_template(
        conversations=[list(messages)], chat_template=template, return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map, **(arguments or {}),
    )  # fmt: skip
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _special_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _look_alikes(
    tokenizer: Any, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], text: str
) -> list[Span]:
    """Spans of contents that quote a special token: as text they must not become that token."""
    special = _special_tokens(tokenizer)
    quoting = [turn for turn, m in enumerate(messages) if any(token in m["content"] for token in special)]
    spans = [_content_span(messages, turn, render, text) for turn in quoting]
    return sorted(span for span in spans if span)


def _encode(tokenizer: Any, text: str, as_plain_text: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each token id with its place in the text. Special tokens are not looked for inside `as_plain_text`."""
    edges = [0, *(edge for span in as_plain_text for edge in span), len(text)]
    found: list[tuple[int, Span]] = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        encoded = tokenizer(
            text[start:stop], add_special_tokens=False, return_offsets_mapping=True,
            split_special_tokens=number % 2 == 1,
        )  # fmt: skip
        places = ((start + a, start + b) for a, b in encoded.offset_mapping)
        found += zip(encoded.input_ids, places, strict=True)
    return found


def _render(
    tokenizer: Any, messages: Sequence[Message], arguments: Arguments | None, add_generation_prompt: bool = False
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(arguments or {})
            )
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"the chat template refuses the messages: {str(error).splitlines()[0]}") from error
