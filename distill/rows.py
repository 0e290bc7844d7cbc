"""Chat data becomes token rows with the supervised positions marked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.records import read_records
from decode.chat import render_chat, render_prompt
from eval.suites import check_messages


@dataclass(frozen=True)
class Row:
    """Token ids of one chat, and for each whether it is part of an answer, which is what is supervised."""

    ids: list[int]
    is_answer: list[bool]

    @property
    def supervised(self) -> int:
        """Answer tokens that some position predicts: all but a first token of the row."""
        return sum(self.is_answer[1:])


def read_rows(path: Path, tokenizer: Any, max_tokens: int) -> list[Row]:
    """Read chats (`messages`, optionally with the exact `answer_ids` that the target wrote).

    A row longer than `max_tokens` is cut. Raises UserError naming file and line for a bad row, a row without an
    assistant turn, one whose answer lies wholly beyond the cut, or a file without rows.
    """
    rows = [_row(record, where, tokenizer, max_tokens) for where, record in read_records(path)]
    if not rows:
        raise UserError(f"{path}: no rows in it; nothing to learn from")
    return rows


def split_held_out(rows: list[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, `count` held-out rows), a random split that only the seed decides."""
    if count >= len(rows):
        raise UserError(f"data.held_out_rows is {count} but there are {len(rows)} rows; leave some to train on")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = set(order[:count])
    return [row for i, row in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def _row(record: dict[str, Any], where: str, tokenizer: Any, max_tokens: int) -> Row:
    messages = check_messages(record.get("messages"), where)
    if not any(turn["role"] == "assistant" for turn in messages):
        raise UserError(f"{where}: no assistant turn; `draftsmith data` lets the target write the answers")
    answer_ids = record.get("answer_ids")
    try:
        if answer_ids is not None:
            _check_answer_ids(answer_ids, messages, len(tokenizer))
            prompt_ids = render_prompt(tokenizer, messages[:-1])
            row = Row(prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids))
        else:
            rendered = render_chat(tokenizer, messages)
            row = Row(rendered.ids, rendered.is_answer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    cut = Row(row.ids[:max_tokens], row.is_answer[:max_tokens])
    if not cut.supervised:
        raise UserError(
            f"{where}: no answer token is left within {max_tokens} of {len(row.ids)} tokens; raise data.max_tokens"
        )
    return cut


def _check_answer_ids(answer_ids: Any, messages: list[dict[str, str]], vocabulary: int) -> None:
    if messages[-1]["role"] != "assistant":
        raise UserError("answer_ids belong to a last assistant turn, but the last turn is the user's")
    if not isinstance(answer_ids, list) or not all(isinstance(i, int) and 0 <= i < vocabulary for i in answer_ids):
        raise UserError(f"answer_ids: expected a list of token ids from 0 to {vocabulary - 1}")
