"""Chats of any shape from files, saved data sets and data sets like the Hub's; and the look at them."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import CASES

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from decode.conversations import to_messages
from eval.sources import source_records

ROOT = Path(__file__).resolve().parent.parent
DRAFTSMITH = Path(sys.executable).parent / "draftsmith"
ROWS = [
    {"conversations": [{"from": "human", "value": f"Item {i}?"}, {"from": "gpt", "value": "Listed."}]} for i in range(5)
]


def run(*arguments):
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_prompt_and_completion_tool_calls_and_parts_are_chats():
    assert to_messages({"prompt": "Who?", "completion": "The clerk."}) == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The clerk."},
    ]
    turns = [{"role": "user", "content": "Who?"}]
    assert to_messages({"prompt": turns, "completion": [{"role": "assistant", "content": "I."}]})[1]["content"] == "I."
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "count", "arguments": {}}}]}
    chat = to_messages({"messages": [*turns, call, {"role": "observation", "content": "7", "name": "count"}]})
    assert chat[1]["content"] == ""
    assert chat[1]["tool_calls"] == call["tool_calls"]
    assert chat[2] == {"role": "tool", "content": "7", "name": "count"}
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]
    assert to_messages({"messages": [{"role": "user", "content": parts}]})[0]["content"] == "Who?"
    assert to_messages({"prompt": "Who?", "completion": None, "response": "I."})[1]["content"] == "I."
    with pytest.raises(UserError, match="a text part without text"):
        to_messages({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]})
    with pytest.raises(UserError, match="image parts"):
        to_messages({"messages": [{"role": "user", "content": [{"type": "image"}]}]})


def test_a_saved_data_set_and_one_loaded_by_name_read_like_a_file(tmp_path, monkeypatch):
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(tmp_path / "both")
    read = [to_messages(row) for _, row in source_records(str(tmp_path / "alone"), "train", BadRows())]
    assert read == [to_messages(row) for row in ROWS]
    assert len(list(source_records(str(tmp_path / "both"), "test", BadRows()))) == 1
    with pytest.raises(UserError, match="no split 'dev' in it; it has train, test"):
        list(source_records(str(tmp_path / "both"), "dev", BadRows()))
    with pytest.raises(UserError, match="not a data set folder"):
        list(source_records(str(ROOT / "docs"), "train", BadRows()))
    asked = {}

    def load_dataset(path, **how):
        asked.update(how, path=path)
        return whole.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = list(source_records("org/chats@v2", "train", BadRows(), "main"))
    assert len(found) == 5
    assert found[0][0] == "org/chats@v2 train row 1"
    assert asked == {"path": "org/chats", "name": "main", "revision": "v2", "split": "train", "streaming": True}


def test_a_stream_that_breaks_off_is_named_with_its_row(monkeypatch):
    def broken():
        yield ROWS[0]
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken())
    with pytest.raises(UserError, match="org/chats train row 2: cannot be read \\(reset by peer"):
        list(source_records("org/chats", "train", BadRows()))


def test_import_keeps_every_column_and_names_those_that_nothing_reads(tmp_path):
    said = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    rows = [
        {"id": None, "system": "Only French.", "conversations": [{"from": "human", "value": "Who?", "at": said},
         {"from": "gpt", "value": "Moi."}], "answer_ids": [20, 2], "score": 3},
        {"id": "b", "system": None, "conversations": [{"from": "human", "value": "What?", "at": said},
         {"from": "gpt", "value": "Rien."}], "answer_ids": [21, 2], "score": None},
    ]  # fmt: skip
    source, out = tmp_path / "rows.parquet", tmp_path / "chats.jsonl"
    datasets.Dataset.from_list(rows).to_parquet(source)
    done = run(DRAFTSMITH, "data", "import", source, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "1 × column 'score': kept, but nothing here reads it" in done.stderr
    first, second = (row for _, row in read_records(out))
    assert (first["id"], second["id"]) == ("row-00000000", "b")
    assert first["messages"][0] == {"role": "system", "content": "Only French."}
    assert first["messages"][1]["at"].startswith("2026-01-02")
    assert (first["answer_ids"], first["score"]) == ([20, 2], 3)
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant"]


def test_turns_of_both_shapes_in_one_parquet_column_read_like_jsonl(tmp_path):
    rows = [
        {"conversations": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    ]
    whole = [{**dict.fromkeys(("role", "content", "from", "value")), **turn} for row in rows
             for turn in row["conversations"]]  # fmt: skip
    path = tmp_path / "mixed.parquet"
    datasets.Dataset.from_list([{"conversations": whole[:2]}, {"conversations": whole[2:]}]).to_parquet(path)
    read = [to_messages(row) for _, row in read_records(path)]
    assert read[0] == read[1] == [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


def test_import_writes_one_shape_and_names_what_it_left_out(tmp_path):
    out = tmp_path / "chats.jsonl"
    done = run(DRAFTSMITH, "data", "import", CASES / "D05" / "rows.jsonl", "--out", out, "--on-bad-row", "skip")
    assert done.returncode == 0, done.stderr
    assert "6 chats" in done.stdout
    assert "unknown role 'narrator'" in done.stderr
    rows = [row for _, row in read_records(out)]
    assert [row["id"] for row in rows] == list("abcdef")
    assert all(set(turn) == {"role", "content"} for row in rows for turn in row["messages"])
    assert json.loads((tmp_path / "chats.source.json").read_text())["skipped"] == 2
    again = run(DRAFTSMITH, "data", "import", CASES / "D05" / "rows.jsonl", "--out", out)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    stopped = run(DRAFTSMITH, "data", "import", CASES / "D05" / "rows.jsonl", "--out", tmp_path / "b.jsonl")
    assert (stopped.returncode, "rows.jsonl:7" in stopped.stderr) == (2, True)
    assert not (tmp_path / "b.jsonl").exists()


def test_show_marks_what_is_supervised_and_tells_the_share(tiny_target):
    common = [DRAFTSMITH, "data", "show", CASES / "M02" / "conv.jsonl", "--target", tiny_target]
    done = run(*common, "--ids")
    assert done.returncode == 0, done.stderr
    assert "‹First reply.<|im_end|>›" in done.stdout
    totals = {cells[1]: cells[2] for line in done.stdout.splitlines() if len(cells := line.split("│")) == 5}
    assert int(totals[" user      "]) == int(totals[" assistant "]) == 3
    assert "begins with the prompt as served" in done.stdout
    assert "every answer" in done.stdout
    last = run(*common, "--mask", "last")
    assert "‹First reply." not in last.stdout
    assert "‹Third reply.<|im_end|>›" in last.stdout
    for wrong, words in ((["--mask", "first"], "all"), (["--on-bad-row", "x"], "skip")):
        refused = run(*common, *wrong)
        assert (refused.returncode, words in refused.stderr) == (2, True)
