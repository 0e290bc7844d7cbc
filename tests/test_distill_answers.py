"""Target-sampled answers: resumable, repeatable, and never mixed with another run's."""

import json

import pytest
import torch
from transformers import GenerationConfig

from configs.bad_rows import BadRows
from configs.errors import UserError
from decode.chat import render_prompt
from decode.laws import Law
from decode.models import load_model
from distill.answers import DataSettings, fill_file, sample, write_answers
from distill.claims import check_answers
from distill.rows import Reading, answer_faults, read_rows


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


def prompts_file(folder, count=7):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": "Who? " * (i + 1)}) + "\n" for i in range(count)))
    return path


def settings_for(folder, **changes):
    values = {"answers": folder / "answers.jsonl", "prompts": str(prompts_file(folder)), "max_new_tokens": 12,
              "batch_rows": 3}  # fmt: skip
    return DataSettings(**(values | changes))


def test_a_batch_of_answers_equals_each_answer_alone_when_greedy(target):
    prompts = [[5], [9, 8, 7, 6], [4, 5]]
    together = sample(target, prompts, Law(0.0), 10, seed=0)
    assert together == [sample(target, [prompt], Law(0.0), 10, seed=0)[0] for prompt in prompts]


def test_sampled_answers_follow_the_targets_law(target):
    """First tokens of 4,000 samples against the exact law, chi-square at p > 0.001."""
    from scipy.stats import chisquare

    prompt, count = [5, 9, 30], 4000
    law = Law(0.7, top_k=6, top_p=0.95)
    found = [row[0] for row in sample(target, [prompt] * count, law, 1, seed=1)]
    p = law(target.model(torch.tensor([prompt])).logits[0, -1])
    kept = p.nonzero().flatten()
    observed = torch.bincount(torch.tensor(found), minlength=len(p))[kept]
    assert observed.sum() == count
    expected = p[kept] / p[kept].sum() * count
    assert chisquare(observed.double(), expected.double() * count / expected.double().sum()).pvalue > 1e-3


def test_torchs_global_random_state_is_put_back(target):
    before = torch.random.get_rng_state()
    sample(target, [[5]], Law(1.0), 5, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_answers_are_rows_that_training_reads(target, tmp_path):
    settings = settings_for(tmp_path)
    assert write_answers(target, settings, seed=0) == 7
    rows = [json.loads(line) for line in settings.answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(7)]
    assert all(row["finished"] == (row["answer_ids"][-1] in target.eos_ids) for row in rows)
    trained_on = read_rows(settings.answers, target.tokenizer, Reading(200))
    assert [row.supervised for row in trained_on] == [len(row["answer_ids"]) for row in rows]
    check_answers(settings.answers, target, settings.law)


def test_a_killed_run_loses_no_row_repeats_none_and_ends_with_the_same_text(target, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    for folder in (whole, cut):
        write_answers(target, settings_for(folder), seed=0)
    expected = (whole / "answers.jsonl").read_text()
    assert (cut / "answers.jsonl").read_text() == expected
    lines = expected.splitlines(keepends=True)
    for torn in ("", '{"id": "p4", "mess'):  # killed between rows, and while one was written
        (cut / "answers.jsonl").write_text("".join(lines[:4]) + torn)
        write_answers(target, settings_for(cut), seed=0)
        assert (cut / "answers.jsonl").read_text() == expected


def test_a_finished_file_is_not_answered_again(tmp_path):
    calls = []

    def make(batch):
        calls.append(list(batch))
        return [{"id": f"r{i}"} for i in batch]

    for _ in range(2):
        fill_file(tmp_path / "a.jsonl", [f"r{i}" for i in range(5)], 2, make, "rows")
    assert calls == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("changes", "word"), [({"temperature": 0.5}, "temperature"), ({"max_new_tokens": 9}, "max_new_tokens")]
)
def test_a_file_of_another_run_is_refused_with_what_differs(target, tmp_path, changes, word):
    write_answers(target, settings_for(tmp_path), seed=0)
    before = (tmp_path / "answers.jsonl").read_text()
    with pytest.raises(UserError, match=word):
        write_answers(target, settings_for(tmp_path, **changes), seed=0)
    assert (tmp_path / "answers.jsonl").read_text() == before


def test_answers_of_another_target_are_refused_for_training(target, tiny_draft, tmp_path):
    settings = settings_for(tmp_path)
    write_answers(target, settings, seed=0)
    with pytest.raises(UserError, match=r"another target.*revision"):
        check_answers(settings.answers, load_model(str(tiny_draft)), settings.law)


def test_a_file_without_provenance_is_not_continued(target, tmp_path):
    settings = settings_for(tmp_path)
    settings.answers.write_text("")
    with pytest.raises(UserError, match="not ours to continue"):
        write_answers(target, settings, seed=0)


def test_without_prompts_the_target_writes_the_user_turns(target, tmp_path):
    settings = settings_for(tmp_path, prompts=None, self_prompts=5)
    assert write_answers(target, settings, seed=0) == 5
    rows = [json.loads(line) for line in settings.answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"self-{i:06d}" for i in range(5)]
    assert len({row["messages"][0]["content"] for row in rows}) > 1
    assert all("\n" not in row["messages"][0]["content"] for row in rows)


def test_a_prompt_that_leaves_no_room_is_refused_with_its_line(target, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "Who?"}\n' + json.dumps({"prompt": "long " * 300}) + "\n")
    with pytest.raises(UserError, match=r"long\.jsonl:2: no room in the context.*holds 256"):
        write_answers(target, settings_for(tmp_path, prompts=str(path)), seed=0)
    assert not list(tmp_path.glob("answers*"))


def test_the_targets_own_generation_config_does_not_bend_the_law(target):
    """Instruct models ship penalties and filters; answers follow the law that was asked for, and nothing else."""
    model = target.model
    kept, model.generation_config = (
        model.generation_config,
        GenerationConfig(repetition_penalty=1.9, top_k=1, min_p=0.5),
    )
    try:
        bent = sample(target, [[5, 9]], Law(0.0), 20, seed=0)
        assert model.generation_config.repetition_penalty == 1.9
    finally:
        model.generation_config = kept
    assert bent == sample(target, [[5, 9]], Law(0.0), 20, seed=0)


def test_a_prompt_file_that_changed_under_its_name_is_refused(target, tmp_path):
    settings = settings_for(tmp_path)
    write_answers(target, settings, seed=0)
    (tmp_path / "prompts.jsonl").write_text('{"id": "p0", "prompt": "Another question?"}\n')
    with pytest.raises(UserError, match="prompts_sha256"):
        write_answers(target, settings, seed=0)


def test_answers_sampled_under_another_law_are_refused_for_training(target, tmp_path):
    settings = settings_for(tmp_path)
    write_answers(target, settings, seed=0)
    with pytest.raises(UserError, match=r"sampled with temperature 1\.0.*Set data\.temperature=1\.0"):
        check_answers(settings.answers, target, Law(0.5))


def test_a_law_that_makes_no_sense_is_refused_before_anything_is_written(target, tmp_path):
    with pytest.raises(UserError, match="no effect at temperature 0"):
        write_answers(target, settings_for(tmp_path, temperature=0.0, top_k=5), seed=0)
    assert not list(tmp_path.glob("answers*"))


def test_padding_ids_of_the_head_are_never_sampled(target):
    """A law that forbids ids from 40 on, so that the model's own favourites are among the forbidden."""
    for law in (Law(0.0, vocabulary=40), Law(1.0, vocabulary=40)):
        assert all(token < 40 for token in sample(target, [[5, 9]], law, 20, seed=0)[0])


def test_empty_repeated_and_cut_off_answers_are_told_apart_dropped_when_asked_and_counted(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "x"}]
    empty = [chat[0], {"role": "assistant", "content": "  "}]
    records = [
        {"messages": chat, "answer_ids": list(range(20, 40)), "finished": True},
        {"messages": chat, "answer_ids": list(range(20, 40)), "finished": False},
        {"messages": empty, "answer_ids": [2], "finished": True},
        {"messages": chat, "answer_ids": [20, 21, 22] * 12, "finished": False},
        {"messages": chat},
    ]
    assert [answer_faults(record) for record in records] == [[], ["cut_off"], ["empty"], ["repeated", "cut_off"], []]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    bad = BadRows()
    assert len(read_rows(path, tokenizer, Reading(100, drop=("empty", "repeated")), bad)) == 3
    assert bad.notes == {"empty answer dropped": 1, "repeated answer dropped": 1}
    assert len(read_rows(path, tokenizer, Reading(100))) == 5


def test_several_samples_and_a_greedy_answer_to_each_prompt_are_told_apart(target, tmp_path):
    settings = settings_for(tmp_path, samples=2, greedy_too=True, self_prompts=2, batch_rows=4)
    assert write_answers(target, settings, seed=0) == 3 * (7 + 2)
    records = [json.loads(line) for line in settings.answers.read_text().splitlines()]
    assert len({record["id"] for record in records}) == 27
    by_prompt = {}
    for record in records:
        by_prompt.setdefault(record["messages"][0]["content"], []).append(record)
    for prompt, (first, second, greedy) in by_prompt.items():
        assert (first["greedy"], second["greedy"], greedy["greedy"]) == (False, False, True), prompt
        ids = render_prompt(target.tokenizer, greedy["messages"][:-1])
        assert greedy["answer_ids"] == sample(target, [ids], Law(0.0), 12, seed=0)[0]
        assert first["answer_ids"] != second["answer_ids"]
    rows = read_rows(settings.answers, target.tokenizer, Reading(200))
    assert [row.greedy for row in rows] == [record["greedy"] for record in records]


def test_several_samples_at_temperature_0_are_refused():
    with pytest.raises(ValueError, match="no effect at temperature 0"):
        DataSettings(temperature=0, samples=2)


def test_self_written_prompts_of_another_run_are_not_taken_up(target, tmp_path):
    settings = settings_for(tmp_path, prompts=None, self_prompts=4)
    write_answers(target, settings, seed=0)
    settings.answers.unlink()
    settings.answers.with_suffix(".provenance.json").unlink()
    with pytest.raises(UserError, match=r"prompts\.jsonl: holds answers made with another settings\.seed"):
        write_answers(target, settings, seed=99)


def test_prompts_with_the_ids_of_self_written_ones_are_refused(target, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"id": "self-000000", "prompt": "Who?"}) + "\n")
    with pytest.raises(UserError, match="self-000000"):
        write_answers(target, settings_for(tmp_path, prompts=str(path), self_prompts=2), seed=0)


def test_prompts_that_cannot_be_answered_are_skipped_when_asked(target, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "Who?"}\n' + json.dumps({"prompt": "long " * 300}) + "\n")
    assert write_answers(target, settings_for(tmp_path, prompts=str(path), on_bad_row="skip"), seed=0) == 1
    assert "skipped 1 × no room in the context" in capsys.readouterr().err


def test_answers_go_to_a_jsonl_file_which_is_known_before_the_first_one(target, tmp_path):
    with pytest.raises(UserError, match=r"out\.txt: answers are written to a file whose name ends in \.jsonl"):
        write_answers(target, settings_for(tmp_path, answers=tmp_path / "out.txt"), seed=0)


def test_an_answer_that_both_loops_and_is_cut_off_is_dropped_for_either(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "x"}]
    path = tmp_path / "a.jsonl"
    both = {"messages": chat, "answer_ids": [20, 21, 22] * 12, "finished": False}
    fine = {"messages": chat, "answer_ids": [20, 2], "finished": True}
    path.write_text("".join(json.dumps(record) + "\n" for record in (both, fine)))
    for drop in (("cut_off",), ("repeated",)):
        assert len(read_rows(path, tokenizer, Reading(100, drop=drop))) == 1
    path.write_text(json.dumps(fine | {"answer_ids": [[1]] * 9}) + "\n")
    with pytest.raises(UserError, match="answer_ids: expected a list of token ids"):
        read_rows(path, tokenizer, Reading(100, drop=("repeated",)))
