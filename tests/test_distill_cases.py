"""Faults that users met when preparing chats and training on them: small inputs with the right behaviour."""

import copy
import json

import pytest
import torch
from conftest import CASES
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from decode.chat import render_prompt
from decode.conversations import to_messages
from distill.batches import collate
from distill.objectives import forward_kl, objective
from distill.rows import OPENING_TURN, Reading, Row, read_row, read_rows
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher

SHARED = CASES / "_shared"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small():
    return AutoTokenizer.from_pretrained(SHARED / "tok_small")


def with_template(tokenizer, path):
    other = copy.deepcopy(tokenizer)
    other.chat_template = path.read_text()
    return other


def expected(case, name="expected.json"):
    return json.loads((CASES / case / name).read_text())


def supervised(tokenizer, row):
    spans, current = [], []
    for token, mark in [*zip(row.ids, row.is_answer, strict=True), (0, False)]:
        if mark:
            current.append(token)
        elif current:
            spans.append(tokenizer.decode(current))
            current = []
    return spans


def test_d01_rows_that_the_template_refuses_are_skipped_with_its_own_reason(small):
    case, path = expected("D01"), CASES / "D01" / "rows.jsonl"
    strict = with_template(small, CASES / "D01" / "strict_turns.jinja")
    for _, record in read_records(path):
        if record["id"] in case["kept"]:
            assert read_row(record, strict, Reading(200), BadRows()).supervised
        else:
            with pytest.raises(UserError, match=r"turns must go user|system turn must come first"):
                read_row(record, strict, Reading(200), BadRows())
    bad = BadRows("skip")
    assert len(read_rows(path, strict, Reading(200), bad)) == 3
    assert bad.skipped == 3
    assert any("rows.jsonl:2" in line and "turns must go user" in line for line in bad.lines())
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the chat template refuses"):
        read_rows(path, strict, Reading(200))


def test_d03_broken_lines_are_named_or_skipped_and_counted(small):
    case, path = expected("D03"), CASES / "D03" / "rows.jsonl"
    with pytest.raises(UserError, match=r"rows\.jsonl:3: not valid JSON"):
        read_rows(path, small, Reading(200))
    refused = {}

    class Noting(BadRows):
        def refuse(self, where, reason):
            refused[where.rsplit(":", 1)[1]] = reason
            super().refuse(where, reason)

    assert len(read_rows(path, small, Reading(200), Noting("skip"))) == len(case["good_lines"])
    assert set(refused) == set(case["bad_lines"])


@pytest.mark.parametrize("name", ["prompt_column", "user_only"])
def test_d04_data_without_answers_is_refused_before_any_step(small, name):
    path = CASES / "D04" / f"{name}.jsonl"
    with pytest.raises(UserError, match=r":1: no assistant turn"):
        read_rows(path, small, Reading(200))
    with pytest.raises(UserError, match=r"no usable rows.*skipped 8 × no assistant turn"):
        read_rows(path, small, Reading(200), BadRows("skip"))


def test_d05_roles_and_columns_of_every_shape_are_read_and_unknown_ones_named(small):
    case, path = expected("D05"), CASES / "D05" / "rows.jsonl"
    bad, found = BadRows("skip"), {}
    for where, record in read_records(path):
        try:
            row = read_row(record, small, Reading(200), bad)
            found[record["id"]] = [text.removesuffix("<|im_end|>") for text in supervised(small, row)]
        except UserError as error:
            bad.refuse(where, str(error))
    assert found == case["supervised_text"]
    assert bad.notes == {OPENING_TURN: 1}
    assert any("unknown role 'narrator'" in reason for reason in bad.reasons)
    assert any("no chat in it" in reason and "text" in reason for reason in bad.reasons)


@pytest.mark.parametrize("name", ["chatml_plain", "chatml_marked"])
def test_m01_templates_with_and_without_marks_give_the_same_spans(small, name):
    tokenizer = with_template(small, CASES / "M01" / f"{name}.jinja")
    rows = read_rows(CASES / "M01" / "conv.jsonl", tokenizer, Reading(200))
    for row, wanted in zip(rows, expected("M01")["rows"], strict=True):
        assert tokenizer.decode(row.ids) == wanted["rendered"]
        assert supervised(tokenizer, row) == wanted["supervised_text"]


def test_m02_every_answer_counts_or_the_last_one_when_asked(small):
    path, case = CASES / "M02" / "conv.jsonl", expected("M02")
    (row,) = read_rows(path, small, Reading(200))
    assert supervised(small, row) == case["all_turns"]
    (row,) = read_rows(path, small, Reading(200, last_only=True))
    assert supervised(small, row) == case["last_turn_only"]


def test_m03_a_cut_leaves_what_fits_and_a_row_without_answer_is_dropped_and_counted(small):
    path, case = CASES / "M03" / "conv.jsonl", expected("M03")
    whole = read_rows(path, small, Reading(1000))
    assert [len(row.ids) for row in whole] == case["full_lengths"]
    bad = BadRows("skip")
    rows = read_rows(path, small, Reading(case["max_length"]), bad)
    assert [row.supervised for row in rows] == case["supervised_tokens_after_cut"][1:]
    assert bad.skipped == 1
    assert not supervised(small, rows[0])[0].endswith("<|im_end|>")
    with pytest.raises(UserError, match=r"conv\.jsonl:1: no answer token is left"):
        read_rows(path, small, Reading(case["max_length"]))


def test_m05_text_that_looks_like_turns_is_text(small):
    rows = read_rows(CASES / "M05" / "conv.jsonl", small, Reading(400))
    assert [supervised(small, row) for row in rows] == expected("M05")["supervised_text"]
    start, end = small.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    records = [record for _, record in read_records(CASES / "M05" / "conv.jsonl")]
    for row, record in zip(rows, records, strict=True):  # the turns' own marks and no others
        assert row.ids.count(start) == row.ids.count(end) == len(record["messages"])
    prompt = render_prompt(small, records[0]["messages"][:1])
    assert rows[0].ids[: len(prompt)] == prompt


def test_m07_the_position_before_an_answer_counts_and_its_last_one_does_not():
    case = expected("M07")
    row = Row(case["input_ids"], [bool(mark) for mark in case["token_mask"]])
    batch = collate([[row]], CPU)
    assert batch.predicts[0].nonzero().flatten().tolist() == case["logit_positions_in_loss"]
    target, draft = (AutoModelForCausalLM.from_pretrained(SHARED / name).eval() for name in ("target_ctx", "draft_ctx"))

    def loss(student, shift_at=None):
        hidden = Teacher(target).hidden(batch.ids, torch.ones_like(batch.predicts))
        if shift_at is not None:
            hidden[shift_at] += 1.0
        supervised_hidden = hidden[batch.predicts[0]]
        signal = {"hidden": supervised_hidden, "head": target.lm_head.weight}
        return DistillStep(LMStudent(student), objective("forward_kl"))(signal, ids=batch.ids, predicts=batch.predicts)[
            0
        ].item()

    assert loss(copy.deepcopy(target)) == pytest.approx(0.0, abs=1e-5)
    first, last = case["logit_positions_in_loss"][0], case["logit_positions_in_loss"][-1] + 1
    assert loss(draft, shift_at=first) != pytest.approx(loss(draft))
    assert loss(draft, shift_at=last) == loss(draft)


def test_m08_training_starts_with_the_ids_that_serving_makes_and_one_begin_token():
    case = expected("M08")
    tokenizer = AutoTokenizer.from_pretrained(CASES / "M08" / "tok_adds_bos")
    for (_, record), wanted in zip(read_records(CASES / "M08" / "conv.jsonl"), case["rendered_rows"], strict=True):
        row = read_row(record, tokenizer, Reading(200), BadRows())
        prompt = render_prompt(tokenizer, to_messages(record)[:-1])
        assert row.ids[: len(prompt)] == prompt
        assert prompt[:2] == case["leading_ids_right"]
        assert tokenizer.decode(row.ids) == wanted


def test_l02_padding_changes_neither_loss_nor_gradient():
    case = expected("L02", "oracle.json")
    student, teacher = (torch.tensor(case[f"{name}_logits"], dtype=torch.float64) for name in ("student", "teacher"))
    mask = torch.tensor(case["mask_on_logit_positions"], dtype=torch.bool)
    found = []
    for padding in (0, 1, 10, 100):
        pad = torch.randn(student.shape[0], padding, student.shape[-1], dtype=torch.float64)
        padded = torch.cat([student, pad], dim=1).requires_grad_()
        keep = torch.cat([mask, torch.zeros(mask.shape[0], padding, dtype=torch.bool)], dim=1)
        loss = forward_kl(torch.cat([teacher, pad], dim=1)[keep], padded[keep]).sum() / keep.sum()
        loss.backward()
        found.append((loss.item(), padded.grad[:, : student.shape[1]]))
    assert found[0][0] == pytest.approx(case["right_masked_mean"], abs=1e-6)
    for value, gradient in found[1:]:
        assert value == pytest.approx(found[0][0], abs=1e-9)
        assert (gradient - found[0][1]).abs().max() < 1e-9


def test_l10_a_row_packed_after_another_has_the_loss_it_has_alone():
    case = expected("L10", "scenario.json")
    target, draft = (AutoModelForCausalLM.from_pretrained(SHARED / name).eval() for name in ("target_ctx", "draft_ctx"))
    a, b = (Row(case[name], [False] * 3 + [True] * (len(case[name]) - 3)) for name in ("row_a", "row_b"))
    step, teacher = DistillStep(LMStudent(draft), objective("forward_kl")), Teacher(target)

    def loss(sequences):
        batch = collate(sequences, CPU)
        signal = {"hidden": teacher.hidden(batch.ids, batch.predicts, batch.positions), "head": teacher.head_weight}
        return step(signal, ids=batch.ids, predicts=batch.predicts, positions=batch.positions)[0].item()

    assert loss([[a, b]]) == pytest.approx(loss([[a]]) + loss([[b]]), abs=1e-4)
    batch = collate([[a, b]], CPU)
    together = teacher.hidden(batch.ids, torch.ones_like(batch.predicts), batch.positions)[len(a.ids) :]
    alone = teacher.hidden(torch.tensor([b.ids]), torch.ones(1, len(b.ids), dtype=torch.bool))
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
