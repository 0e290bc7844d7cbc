"""The examples of docs/data.md, run."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from distill.rows import Reading, read_row, read_rows

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```(jsonl|jsonl-bad)\n(.*?)```.*?```text\n(.*?)```", PAGE, flags=re.DOTALL)


def marked(row, tokenizer) -> str:
    pieces = groupby(zip(row.ids, row.is_answer, strict=True), key=lambda pair: pair[1])
    texts = [(is_answer, tokenizer.decode([token for token, _ in tokens])) for is_answer, tokens in pieces]
    return "".join(f"‹{text}›" if is_answer else text for is_answer, text in texts)


def test_the_page_has_its_examples():
    assert [kind for kind, *_ in EXAMPLES] == ["jsonl", "jsonl", "jsonl-bad"]


@pytest.mark.parametrize("number", [0, 1])
def test_rows_become_the_text_and_the_marks_that_the_page_shows(number, tokenizer, tmp_path):
    _, rows, shown = EXAMPLES[number]
    path = tmp_path / "a.jsonl"
    path.write_text(rows)
    for row in read_rows(path, tokenizer, Reading(200)):
        assert marked(row, tokenizer).rstrip() == shown.rstrip()


def test_bad_rows_are_refused_in_the_words_of_the_page(tokenizer, tmp_path):
    _, rows, reasons = EXAMPLES[2]
    path = tmp_path / "a.jsonl"
    path.write_text(rows)
    for (_, record), reason in zip(read_records(path), reasons.strip().splitlines(), strict=True):
        with pytest.raises(UserError, match=re.escape(reason)):
            read_row(record, tokenizer, Reading(200), BadRows())
