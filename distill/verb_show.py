"""The verb `data show`: look at rows as training will see them, before a long run."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.command_line import OnBadRow

if TYPE_CHECKING:
    from distill.rows import Reading, Row


def show(
    file: Annotated[Path, typer.Argument(help="Chats, .jsonl or .parquet.")],
    target: Annotated[str, typer.Option(help="Whose tokenizer and chat template count; named as for distill.")],
    rows: Annotated[int, typer.Option("--rows", "-n", help="Rows to print.", min=0)] = 3,
    mask: Annotated[
        Literal["all", "last"], typer.Option(help="Answers that are supervised: all, or the last of a chat.")
    ] = "all",
    max_tokens: Annotated[int, typer.Option(help="Longest row; the rest is cut.", min=2)] = 1024,
    text: Annotated[bool, typer.Option("--text", help="Learn from plain `text` rows too, every token.")] = False,
    template_argument: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the chat template, e.g. enable_thinking=false.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print token ids, and those of the prompt as served.")] = False,
    on_bad_row: OnBadRow = "error",
) -> None:
    """Print rows with the supervised text marked; of the whole file, totals per role and the share supervised."""
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    from configs.bad_rows import BadRows
    from configs.reader import read_pairs
    from configs.records import read_records
    from decode.models import load_tokenizer
    from distill.rows import Reading, read_row, read_rows

    tokenizer = load_tokenizer(target)
    reading = Reading(max_tokens, mask == "last", read_pairs(template_argument or []), text)
    bad = BadRows(on_bad_row)
    every = read_rows(file, tokenizer, reading, bad)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    shown, turns, tokens_of = 0, Counter[str](), Counter[str]()
    for where, record in read_records(file, BadRows("skip")):
        try:
            row = read_row(record, tokenizer, reading, BadRows())
        except ValueError:
            row = None  # told below
        if row is None:
            continue
        for role, content in _said(record, reading):
            turns[role] += 1
            tokens_of[role] += len(tokenizer(content, add_special_tokens=False).input_ids)
        if shown == rows:
            continue
        shown += 1
        console.print(f"── {where} · {row.supervised} of {len(row.ids)} tokens supervised", style="bold", markup=False)
        _print_row(console, row, tokenizer)
        if ids:
            _print_ids(console, row, record, tokenizer, reading)
    for line in bad.lines():
        console.print(line, markup=False)
    table = Table("role", "turns", "tokens of their contents")
    for role in turns:
        table.add_row(role, str(turns[role]), str(tokens_of[role]))
    console.print(table)
    supervised, tokens = sum(row.supervised for row in every), sum(len(row.ids) for row in every)
    console.print(
        f"{len(every)} rows · {supervised} of {tokens} tokens supervised ({supervised / tokens:.0%}), "
        f"{'the last answer of each chat' if mask == 'last' else 'every answer'}",
        style="bold",
    )


def _said(record: dict[str, Any], reading: "Reading") -> list[tuple[str, str]]:
    """Who says what in a row."""
    from decode.conversations import to_messages

    if reading.text and isinstance(record.get("text"), str):
        return [("text", record["text"])]
    return [(message["role"], message["content"]) for message in to_messages(record)]


def _print_row(console: Any, row: "Row", tokenizer: Any) -> None:
    """Supervised text is green, or in ‹ › where there is no colour."""
    colour = console.is_terminal and not console.no_color
    for is_answer, tokens in groupby(zip(row.ids, row.is_answer, strict=True), key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in tokens])
        if is_answer and not colour:
            piece = f"‹{piece}›"
        console.print(piece, end="", style="green" if is_answer else None, markup=False)
    console.print()


def _print_ids(console: Any, row: "Row", record: dict[str, Any], tokenizer: Any, reading: "Reading") -> None:
    from decode.chat import render_prompt
    from decode.conversations import to_messages

    if reading.text and isinstance(record.get("text"), str):  # no prompt is served before plain text
        console.print(f"trained on: {row.ids}", markup=False)
        return
    messages = to_messages(record)
    arguments = {**(reading.template_arguments or {}), **({"tools": record["tools"]} if record.get("tools") else {})}
    last = max(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    served = render_prompt(tokenizer, messages[:last], arguments)
    console.print(f"trained on: {row.ids}", markup=False)
    console.print(f"served:     {served}", markup=False)
    same = row.ids[: len(served)] == served
    console.print("the row begins with the prompt as served" if same else "THE ROW BEGINS OTHERWISE THAN THE PROMPT")
