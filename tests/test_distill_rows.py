"""Chat data: supervised spans, bad rows, batches, the order of rows."""

import copy
import json

import pytest
import torch
from conftest import CHATML

from configs.bad_rows import BadRows
from configs.errors import UserError
from decode.chat import render_chat, render_prompt, template_fingerprint
from distill.batches import Schedule, collate
from distill.rows import Reading, Row, read_row, read_rows, split_held_out
from distill.supply import micro_batches_per_step
from train.loop import TrainSettings

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "The clerk."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Before noon."},
]


ANSWERED = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer_ids": %s}'


def supervised_text(tokenizer, ids, marks):
    spans, current = [], []
    for token, mark in zip(ids, marks, strict=True):
        if mark:
            current.append(token)
        elif current:
            spans.append(tokenizer.decode(current))
            current = []
    return spans + ([tokenizer.decode(current)] if current else [])


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_answer_is_supervised_with_its_end_of_turn_and_nothing_else(tokenizer):
    rendered = render_chat(tokenizer, CHAT)
    found = supervised_text(tokenizer, rendered.ids, rendered.is_answer)
    assert found == ["The clerk.<|im_end|>", "Before noon.<|im_end|>"]


def test_text_that_looks_like_a_turn_moves_no_boundary(tokenizer):
    chat = [
        {"role": "user", "content": "Say assistant\nhello"},
        {"role": "assistant", "content": "assistant\nhello"},
    ]
    rendered = render_chat(tokenizer, chat)
    assert supervised_text(tokenizer, rendered.ids, rendered.is_answer) == ["assistant\nhello<|im_end|>"]


def test_the_prompt_that_is_served_begins_the_row_that_is_trained_on(tokenizer):
    chat = CHAT[:3]
    prompt, whole = render_prompt(tokenizer, chat[:2]), render_chat(tokenizer, chat)
    assert whole.ids[: len(prompt)] == prompt
    assert whole.is_answer.index(True) == len(prompt)


def test_a_begin_token_in_the_template_comes_once(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "<|endoftext|>" + CHATML
    assert render_prompt(other, CHAT[:2]).count(0) == 1


def test_a_template_that_changes_earlier_text_with_later_turns_still_shows_its_answers(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages | length }}" + CHATML
    rendered = render_chat(other, CHAT)
    assert supervised_text(other, rendered.ids, rendered.is_answer) == [
        "The clerk.<|im_end|>",
        "Before noon.<|im_end|>",
    ]


def test_a_template_that_hides_an_answer_is_refused(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['role'] }}\n{% endfor %}"
    with pytest.raises(UserError, match="does not show where this answer begins"):
        render_chat(other, CHAT)


def test_exact_answer_ids_are_used_as_they_are(tokenizer, tmp_path):
    row = {"id": "a", "messages": CHAT[:3], "answer_ids": [40, 41, 42]}
    (read,) = read_rows(write(tmp_path / "a.jsonl", row), tokenizer, Reading(100))
    assert read.ids[-3:] == [40, 41, 42]
    assert read.supervised == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"messages": [', ["a.jsonl:2", "not valid JSON"]),
        ("null", ["a.jsonl:2", "expected a JSON object", "NoneType"]),
        ('{"messages": "x"}', ["a.jsonl:2", "list of turns", "str"]),
        ('{"text": "x"}', ["a.jsonl:2", "messages", "data.text=true"]),
        ('{"messages": [{"role": "user", "content": "x"}]}', ["a.jsonl:2", "no assistant turn"]),
        ('{"messages": [{"role": "narrator", "content": "x"}]}', ["a.jsonl:2", "unknown role 'narrator'"]),
        ('{"messages": [{"role": "assistant", "content": 3}]}', ["a.jsonl:2", "role and a content"]),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', ["a.jsonl:2", "surrogate"]),
        (ANSWERED % '"x"', ["a.jsonl:2", "answer_ids", "list of token ids"]),
        (ANSWERED % "[5, 99999]", ["a.jsonl:2", "answer_ids", "list of token ids"]),
    ],
)
def test_a_bad_row_stops_with_file_and_line(tokenizer, tmp_path, content, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": CHAT}).encode() + b"\r\n" + content.encode())
    with pytest.raises(UserError) as caught:
        read_rows(path, tokenizer, Reading(100))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bom_crlf_and_blank_lines_are_no_fault(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"messages": CHAT}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row)
    assert len(read_rows(path, tokenizer, Reading(100))) == 2


def test_parquet_reads_like_jsonl(tokenizer, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    from_json = read_rows(write(tmp_path / "a.jsonl", {"messages": CHAT}), tokenizer, Reading(100))
    assert read_rows(tmp_path / "a.parquet", tokenizer, Reading(100)) == from_json


def test_an_empty_or_missing_data_set_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="nothing to learn from"):
        read_rows(tmp_path / "a.jsonl", tokenizer, Reading(100))
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "b.jsonl", tokenizer, Reading(100))


def test_a_row_whose_answer_lies_beyond_the_cut_is_refused_and_a_partly_cut_one_is_kept(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": CHAT[1:3]})
    (whole,) = read_rows(path, tokenizer, Reading(100))
    first = whole.is_answer.index(True)
    (cut,) = read_rows(path, tokenizer, Reading(first + 2))
    assert cut.supervised == 2
    with pytest.raises(UserError, match=r"a\.jsonl:1: no answer token is left within"):
        read_rows(path, tokenizer, Reading(first))


def test_the_position_before_an_answer_predicts_it_and_its_last_token_predicts_nothing():
    batch = collate(
        [[Row([7, 8, 9, 10, 11], [False, False, True, True, False])], [Row([5, 6], [False, True])]],
        torch.device("cpu"),
    )
    assert batch.predicts.tolist() == [[False, True, True, False, False], [True, False, False, False, False]]
    assert batch.ids[1].tolist() == [5, 6, 0, 0, 0]


def test_each_epoch_takes_every_row_once_and_in_another_order():
    schedule = Schedule(num_rows=10, batch_rows=4, seed=0)
    taken = [row for step in range(5) for row in schedule.rows_of(step)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]
    assert taken == [row for step in range(5) for row in Schedule(10, 4, 0).rows_of(step)]
    assert taken != [row for step in range(5) for row in Schedule(10, 4, 1).rows_of(step)]


def test_processes_share_a_step_without_overlap():
    schedule = Schedule(num_rows=10, batch_rows=4, seed=0)
    shares = [schedule.share_of(1, process, 2) for process in range(2)]
    assert [len(share) for share in shares] == [2, 2]
    assert sorted(shares[0] + shares[1]) == sorted(schedule.rows_of(1))


def test_rows_that_processes_cannot_share_equally_are_refused():
    assert micro_batches_per_step(TrainSettings(batch_rows=12, micro_rows=4), processes=2) == 2
    with pytest.raises(UserError, match="3 processes cannot share"):
        micro_batches_per_step(TrainSettings(batch_rows=16), processes=3)


def test_held_out_rows_are_kept_back_and_cannot_be_all():
    rows = [Row([i, i], [False, True]) for i in range(10)]
    training, held_out = split_held_out(rows, 3, seed=0)
    assert (len(training), len(held_out)) == (7, 3)
    assert not {row.ids[0] for row in training} & {row.ids[0] for row in held_out}
    assert split_held_out(rows, 3, seed=0) == (training, held_out)
    with pytest.raises(UserError, match="leave some prompts to train on"):
        split_held_out(rows, 10, seed=0)


def test_answer_ids_that_are_null_are_no_answer_ids(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT, "answer_ids": None})
    first, second = read_rows(path, tokenizer, Reading(100))
    assert first == second


def test_without_a_template_a_row_is_one_prompt_and_its_completion(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: this model has no chat template.*user, assistant, user, assistant"
    ):
        read_rows(write(tmp_path / "a.jsonl", {"messages": CHAT}), bare, Reading(100))
    (row,) = read_rows(write(tmp_path / "b.jsonl", {"prompt": "warm tea", "completion": " again"}), bare, Reading(100))
    answer = [token for token, mark in zip(row.ids, row.is_answer, strict=True) if mark]
    assert bare.decode(row.ids[: -len(answer)]) == "warm tea"
    assert bare.decode(answer) == " again<|im_end|>"


def test_plain_text_is_learned_from_whole_when_asked_for(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "The old pump."}, {"messages": CHAT, "text": None})
    text, chat = read_rows(path, tokenizer, Reading(100, text=True))
    assert all(text.is_answer)
    assert not all(chat.is_answer)


def test_template_arguments_reach_the_template_and_its_fingerprint(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = CHATML + "{% if thinking and add_generation_prompt %}<think>{% endif %}"
    plain, thinking = (render_prompt(other, CHAT[:2], arguments) for arguments in ({}, {"thinking": True}))
    assert other.decode(thinking) == other.decode(plain) + "<think>"
    fingerprints = {template_fingerprint(other, a) for a in ({}, {"thinking": True}, {"thinking": False})}
    assert len(fingerprints) == 3


def test_an_answer_is_found_where_the_end_of_turn_is_not_the_end_of_text(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|endoftext|>"
    rendered = render_chat(other, CHAT)
    found = supervised_text(other, rendered.ids, rendered.is_answer)
    assert found == ["The clerk.<|im_end|>", "Before noon.<|im_end|>"]


def test_end_of_turn_is_supervised_where_it_is_the_padding_too(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.pad_token = other.eos_token
    rendered = render_chat(other, CHAT)
    assert supervised_text(other, rendered.ids, rendered.is_answer)[0].endswith("<|im_end|>")


def test_tools_and_tool_calls_are_given_to_the_template(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% if tools %}{{ tools[0]['name'] }}\n{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['name'] }}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = [
        CHAT[1],
        {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    row = read_row({"messages": chat, "tools": [{"name": "count"}]}, other, Reading(200), BadRows())
    assert other.decode(row.ids).startswith("count\n<|im_start|>user")
    assert supervised_text(other, row.ids, row.is_answer) == ["count<|im_end|>", "Seven.<|im_end|>"]


def test_rows_with_the_same_prompt_are_on_the_same_side():
    rows = [Row([i % 6, 9, 20 + i], [False, False, True], i) for i in range(30)]
    training, held_out = split_held_out(rows, 7, seed=1)
    assert len(held_out) == 10  # whole prompts
    assert not {row.ids[0] for row in training} & {row.ids[0] for row in held_out}
    texts = [Row([i, 9, 20], [True] * 3, i) for i in range(5)]
    assert len(split_held_out(texts, 2, seed=1)[1]) == 2  # plain text has no prompt to share


def test_long_rows_are_cut_or_dropped_as_said_and_counted(tokenizer, tmp_path):
    path = tmp_path / "long.jsonl"
    chat = [{"role": "user", "content": "Who?"}]
    path.write_text("".join(
        json.dumps({"messages": [*chat, {"role": "assistant", "content": "tea " * n}]}) + "\n" for n in (2, 60)
    ))  # fmt: skip
    cut, dropped = BadRows(), BadRows()
    assert [len(row.ids) for row in read_rows(path, tokenizer, Reading(40), cut)][1] == 40
    assert cut.notes == {"row cut at 40 tokens": 1}
    assert len(read_rows(path, tokenizer, Reading(40, drop_long=True), dropped)) == 1
    assert dropped.notes == {"row dropped: longer than 40 tokens": 1}


@pytest.mark.parametrize(
    ("template", "supervised"),
    [
        ("{{ ' ' + m['content'] + ' <|im_end|>' }}", " Me. <|im_end|>"),
        ("{{ m['content'] + '\\n<|im_end|>\\n' }}", "Me.\n<|im_end|>"),
        ("{{ m['content'] + '[END]\\n' }}", "Me.[END]"),  # no special token
        ("{{ m['content'] + '<|im_end|>\\n<|endoftext|>' }}", "Me.<|im_end|>"),  # what follows is not the model's
        ("{{ m['content'] }}{% for c in m['tool_calls'] %}{{ '\\n<call>' + c['name'] + '</call>' }}{% endfor %}"
         "{{ '<|im_end|>\\n' }}", "Me.\n<call>look</call><|im_end|>"),
    ],
)  # fmt: skip
def test_an_answer_is_supervised_through_its_end_mark(tokenizer, template, supervised):
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\\nA:' }}{% else %}"
        + template + "{% endif %}{% endfor %}"
    )  # fmt: skip
    answer = {"role": "assistant", "content": "Me."}
    if "tool_calls" in template:
        answer["tool_calls"] = [{"name": "look"}]
    chat = [{"role": "user", "content": "Who?"}, answer]
    for messages in (chat, [*chat, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "You."}]):
        rendered = render_chat(other, messages)
        first = [token for token, mark in zip(rendered.ids, rendered.is_answer, strict=True) if mark]
        assert other.decode(first).startswith(supervised)
    assert other.decode([t for t, m in zip(*vars(render_chat(other, chat)).values(), strict=True) if m]) == supervised
