"""Chat data becomes token rows with the supervised positions marked."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from decode.chat import Rendered, render_chat, render_prompt
from decode.conversations import Message, to_messages
from eval.text import repeated_tokens

REPEATED_SHARE = 0.5
OPENING_TURN = "opening assistant turn: it answers nothing and is not supervised"


@dataclass(frozen=True)
class Row:
    """Token ids of one chat, and for each whether it is part of an answer, which is what is supervised.

    `number` is its place among the rows of its file. `weights`, one for each token, multiply its loss; None is 1.
    `greedy` says that the target answered greedily, whatever the temperature of the others.
    """

    ids: list[int]
    is_answer: list[bool]
    number: int = field(default=0, compare=False)
    weights: list[float] | None = None
    greedy: bool = False

    @property
    def supervised(self) -> int:
        """Answer tokens that some position predicts: all but a first token of the row."""
        return sum(self.is_answer[1:])


@dataclass(frozen=True)
class Reading:
    """How records become rows: longest row, which answers count, the template's arguments, whether text rows count.

    `drop` names answers of the target (rows with `answer_ids`) that are left out and counted: cut_off ended at the
    token limit, empty have no text, repeated have most of their tokens in 8-grams that came before. `drop_long` leaves
    out rows that are longer than `max_tokens` instead of cutting them; both are counted.
    """

    max_tokens: int
    last_only: bool = False
    template_arguments: Mapping[str, Any] | None = None
    text: bool = False
    drop: Collection[str] = ()
    drop_long: bool = False


def read_rows(path: Path, tokenizer: Any, reading: Reading, bad: BadRows | None = None) -> list[Row]:
    """Read chats of any shape (decode.conversations), optionally with the exact `answer_ids` that the target wrote.

    A row longer than the limit is cut there. Raises UserError naming file and line for a bad row, a row without an
    assistant turn, or one whose answer lies wholly beyond the cut, unless `bad` skips them; and for a file of which
    nothing is left.
    """
    bad = bad or BadRows()
    rows: list[Row] = []
    for where, record in read_records(path, bad):
        try:
            row = read_row(record, tokenizer, reading, bad)
            faults = [fault for fault in answer_faults(record) if fault in reading.drop]
            if faults:
                bad.notes[f"{faults[0]} answer dropped"] += 1
            elif row is None:
                bad.notes[f"row dropped: longer than {reading.max_tokens} tokens"] += 1
            else:
                rows.append(replace(row, number=len(rows)))
        except UserError as error:
            bad.refuse(where, str(error))
    if not rows:
        raise UserError("; ".join([f"{path}: no usable rows in it; nothing to learn from", *bad.lines()]))
    return rows


def read_row(record: Mapping[str, Any], tokenizer: Any, reading: Reading, bad: BadRows) -> Row | None:
    """One record as a row; None when it is longer than asked for and dropped for that.

    Raises UserError without the place, which the caller adds.
    """
    is_text = reading.text and isinstance(record.get("text"), str)
    rendered = _text_row(record, tokenizer) if is_text else _chat_row(record, tokenizer, reading, bad)
    row = Row(
        rendered.ids[: reading.max_tokens], rendered.is_answer[: reading.max_tokens],
        greedy=record.get("greedy") is True,
    )  # fmt: skip
    if len(rendered.ids) > reading.max_tokens:
        if reading.drop_long:
            return None
        bad.notes[f"row cut at {reading.max_tokens} tokens"] += 1
    if not row.supervised:
        raise UserError(f"no answer token is left within {reading.max_tokens} tokens; raise data.max_tokens")
    return row


def answer_faults(record: Mapping[str, Any]) -> list[str]:
    """All that is wrong with an answer that the target wrote: empty, repeated, cut_off. For a record that reads."""
    ids = record.get("answer_ids")
    if not isinstance(ids, list):
        return []
    found = {
        "empty": not ids or not str(to_messages(record)[-1]["content"]).strip(),
        "repeated": repeated_tokens(ids) > REPEATED_SHARE * len(ids),
        "cut_off": record.get("finished") is False,
    }
    return [fault for fault, is_so in found.items() if is_so]


def split_held_out(rows: list[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, `count` or a few more held-out rows), a random split that only the seed decides.

    Rows with the same prompt, up to the first answer, are on the same side.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_prompt[tuple(row.ids[: row.is_answer.index(True) or None])].append(number)  # plain text has no prompt
    prompts = list(by_prompt.values())
    held_out: set[int] = set()
    for i in torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(held_out) < count:
            held_out.update(prompts[i])
    if len(held_out) == len(rows):
        raise UserError(
            f"data.held_out_rows is {count} but there are {len(rows)} rows to {len(prompts)} prompts; "
            "leave some prompts to train on, or say data.held_out_rows=0 to measure on rows that are trained on"
        )
    return [row for i, row in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def _chat_row(record: Mapping[str, Any], tokenizer: Any, reading: Reading, bad: BadRows) -> Rendered:
    messages = to_messages(record)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise UserError("no assistant turn; `draftsmith data` lets the target write the answers")
    arguments = dict(reading.template_arguments or {})
    if record.get("tools"):
        arguments["tools"] = record["tools"]
    answer_ids = record.get("answer_ids")
    if answer_ids is not None:
        _check_answer_ids(answer_ids, messages, len(tokenizer))
        prompt_ids = render_prompt(tokenizer, messages[:-1], arguments)
        return Rendered(prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids))
    rendered = render_chat(tokenizer, messages, arguments, reading.last_only)
    if next(turn["role"] for turn in messages if turn["role"] != "system") == "assistant":
        bad.notes[OPENING_TURN] += 1
    return rendered


def _text_row(record: Mapping[str, Any], tokenizer: Any) -> Rendered:
    ids = list(tokenizer(str(record["text"])).input_ids)
    return Rendered(ids, [True] * len(ids))


def _check_answer_ids(answer_ids: Any, messages: list[Message], vocabulary: int) -> None:
    if messages[-1]["role"] != "assistant":
        raise UserError("answer_ids belong to a last assistant turn, but the last turn is the user's")
    if not isinstance(answer_ids, list) or not all(isinstance(i, int) and 0 <= i < vocabulary for i in answer_ids):
        raise UserError(f"answer_ids: expected a list of token ids from 0 to {vocabulary - 1}")
