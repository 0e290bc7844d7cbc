"""User turns that the target writes after examples."""

import json
from collections import Counter

import pytest

from decode.chat import encode_text
from decode.models import load_model
from distill.self_prompts import write_prompts
from eval.suites import read_prompts


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


@pytest.fixture
def examples(tmp_path):
    rows = [
        {"category": name, "prompt": f"{word} {i}?"} for name, word in (("b", "who"), ("a", "why")) for i in range(3)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(path)


def write(target, path, examples, answer, count=7):
    """The prompts, and the texts that the target was asked to go on with; its turns are `answer`."""
    asked = []

    def sampled_by(ids, law, max_new_tokens, seed, numbers):
        asked.extend(target.tokenizer.decode(row) for row in ids)
        return [answer for _ in ids]

    return write_prompts(target, path, count, examples, sampled_by, batch_rows=3, seed=0, claim={}), asked


def test_each_category_gets_its_share_of_turns_written_after_two_of_its_own_prompts(target, examples, tmp_path):
    prompts, asked = write(target, tmp_path / "a.prompts.jsonl", examples, encode_text(target.tokenizer, "Hm?"))
    assert Counter(prompt.category for prompt in prompts) == {"a": 4, "b": 3}
    for prompt, text in zip(prompts, asked, strict=True):
        own, other = ("why", "who") if prompt.category == "a" else ("who", "why")
        assert len({word for word in (f"{own} {i}?" for i in range(3)) if word in text}) == 2
        assert other not in text
    assert len(set(asked)) > 2


def test_a_turn_that_ended_is_kept_whole_and_one_that_was_cut_off_keeps_its_first_line(target, examples, tmp_path):
    lines = encode_text(target.tokenizer, "One.\nTwo")
    whole, _ = write(target, tmp_path / "a.prompts.jsonl", examples, [*lines, target.eos_ids[0]])
    cut, _ = write(target, tmp_path / "b.prompts.jsonl", examples, lines)
    assert {prompt.messages[0]["content"] for prompt in whole} == {"One.\nTwo"}
    assert {prompt.messages[0]["content"] for prompt in cut} == {"One."}


def test_an_example_that_the_context_does_not_hold_is_left_out(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 300}) + "\n")
    assert target.context_tokens < 300
    _, asked = write(target, tmp_path / "a.prompts.jsonl", read_prompts(path), [9], count=1)
    assert "long" not in asked[0]
