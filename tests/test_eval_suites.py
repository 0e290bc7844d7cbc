"""Prompt sets: ours are what they promise, other people's are read or refused with a line."""

import json
import re
from collections import Counter

import datasets
import pytest

from configs.errors import UserError
from eval.suites import find_prompts, fingerprint, read_prompts, read_suite, stratified
from eval.text import repeated_share, repeated_tokens

CATEGORIES = {"chat", "code", "maths", "summarising", "extraction", "translation", "creative", "boilerplate"}


def grams(text: str, n: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_the_evaluation_suite_has_enough_prompts_in_every_category():
    counts = Counter(prompt.category for prompt in read_prompts(find_prompts("suite")))
    assert set(counts) == CATEGORIES
    assert sum(counts.values()) >= 120
    assert min(counts.values()) >= 15


def test_the_suite_shares_no_run_of_eight_words_with_the_demos_training_prompts():
    suite, demo = (
        [prompt.messages[-1]["content"] for prompt in read_prompts(find_prompts(name))] for name in ("suite", "demo")
    )
    trained_on = set().union(*map(grams, demo))
    assert not set().union(*map(grams, suite)) & trained_on
    assert not set(suite) & set(demo)


def test_a_stratified_choice_takes_from_every_category_in_turn():
    prompts = read_prompts(find_prompts("suite"))
    counts = Counter(prompt.category for prompt in stratified(prompts, 16))
    assert counts == dict.fromkeys(CATEGORIES, 2)
    assert len(stratified(prompts, 10_000)) == len(prompts)


def test_a_final_answer_is_dropped_and_a_missing_id_comes_from_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    path.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"prompt": "When?"}) + "\n")
    first, second = read_prompts(path)
    assert first.messages == ({"role": "user", "content": "Who?"},)
    assert first.id != second.id == read_prompts(path)[1].id


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"q": "x"}', ["a.jsonl:1", "prompt", "got q"]),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y", "id": 1}', ["a.jsonl:2", "id '1'", "a.jsonl:1"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ["a.jsonl:1", "user turn"]),
        ("", ["a.jsonl", "no rows"]),
        ("{", ["a.jsonl:1", "not valid JSON"]),
    ],
)
def test_a_bad_prompt_file_is_refused_with_its_line(tmp_path, content, words):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_prompts(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_suite_is_refused_with_the_known_names():
    with pytest.raises(UserError, match="demo, suite"):
        find_prompts("nowhere")


def test_repeated_text_is_counted_by_token():
    once, loop = list(range(20)), [*range(8), *range(8), 99]
    assert repeated_tokens(once) == 0
    assert repeated_tokens(loop) == 8
    assert repeated_tokens([7] * 10) == 9  # the second and third 8-gram of the same token overlap
    assert repeated_share([once, loop]) == pytest.approx(8 / 37)
    assert repeated_share([]) == 0.0


def test_the_formats_of_the_usual_benchmarks_are_read(tmp_path):
    rows = {
        "spec_bench": {"question_id": 81, "category": "writing", "turns": ["First?", "Then?"]},
        "mt_bench": {"prompt_id": 4, "category": "maths", "prompt": ["One?", "Two?"], "reference": []},
        "human_eval": {"task_id": "HumanEval/7", "prompt": "def f():\n", "canonical_solution": "    pass", "test": ""},
        "gsm8k": {"question": "How many?", "answer": "#### 3"},
    }
    found = {}
    for name, row in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (found[name],) = read_suite(str(path))
    asked = {name: (p.id, p.category, p.messages[0]["content"], p.later_turns) for name, p in found.items()}
    assert asked["spec_bench"] == ("81", "writing", "First?", ("Then?",))
    assert asked["mt_bench"] == ("4", "maths", "One?", ("Two?",))
    assert asked["human_eval"] == ("HumanEval/7", "all", "def f():\n", ())
    assert asked["gsm8k"][1:] == ("all", "How many?", ())
    assert all(len(p.messages) == 1 for p in found.values())


def test_columns_without_a_use_do_not_stand_in_the_way(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "2+2?", "answer": 4, "turns": null, "category": null}\n')
    (prompt,) = read_suite(str(path))
    assert (prompt.messages[0]["content"], prompt.category) == ("2+2?", "all")


def test_the_id_of_a_later_turn_is_taken(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "turns": ["x", "y"]}\n{"id": "a/2", "prompt": "z"}\n')
    with pytest.raises(UserError, match=r"p.jsonl:2: id 'a/2' stands already at .*p.jsonl:1"):
        read_suite(str(path))


def test_a_later_turn_follows_the_answer_to_the_one_before(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"id": "a/2", "turns": ["One?", "Two?", "Three?"]}) + "\n")
    (first,) = read_suite(str(path))
    second = first.next_turn("Yes.")
    third = second.next_turn("No.")
    assert (second.id, third.id, third.next_turn("So.")) == ("a/2/2", "a/2/3", None)
    assert [turn["content"] for turn in third.messages] == ["One?", "Yes.", "Two?", "No.", "Three?"]


def test_a_saved_data_set_and_a_data_set_of_the_hub_are_suites(tmp_path, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "How many?", "answer": "3"}])
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, **_: iter([{"question": f"{path} {name}?"}]))
    assert read_suite(str(tmp_path / "saved"))[0].messages[0]["content"] == "How many?"
    assert read_suite("org/sums", subset="main")[0].messages[0]["content"] == "org/sums main?"


def test_a_suite_has_another_fingerprint_when_anything_asked_changes(tmp_path):
    path = tmp_path / "p.jsonl"
    seen = set()
    for row in ({"prompt": "A?"}, {"prompt": "B?"}, {"prompt": "B?", "category": "c"}, {"turns": ["B?", "C?"]}):
        path.write_text(json.dumps(row | {"id": 1}) + "\n")
        seen.add(fingerprint(read_suite(str(path))))
    assert len(seen) == 4
