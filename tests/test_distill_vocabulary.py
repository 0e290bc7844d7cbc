"""Heads over part of the vocabulary: the choice, what it costs, and the map that travels inside the draft."""

import json

import pytest
import torch
from conftest import CASES, make_llama
from transformers import AutoTokenizer

from configs.errors import UserError
from decode.drafts.head import head_ids, trim_head
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from distill.build import build_lm_draft, save_draft
from distill.rows import Reading, Row, read_rows
from distill.teacher import Teacher
from distill.vocabulary import ceilings, choose_ids, count_tokens, coverage

KEPT = torch.tensor([2, 5, 7, 40, 41, 90, 200, 299])


@pytest.mark.parametrize("size", [32, 64])
def test_t06_the_most_frequent_ids_are_kept_with_the_end_token_and_the_coverage_is_told(size):
    tokenizer = AutoTokenizer.from_pretrained(CASES / "_shared" / "tok_small")
    case = json.loads((CASES / "T06" / f"expected_{size}.json").read_text())
    rows = read_rows(CASES / "T06" / "train.jsonl", tokenizer, Reading(500))
    counts = count_tokens(rows, 504)
    ids = choose_ids(counts, size, {2}, len(tokenizer))
    assert int((counts > 0).sum()) == case["distinct_supervised_ids"]
    assert ids.tolist() == case["kept_ids_by_count"]
    assert (ids - torch.arange(size)).tolist() == case["d2t_offset_form"]
    assert coverage(counts, ids) == pytest.approx(case["coverage"])


def test_more_ids_than_the_text_has_are_filled_up_and_more_than_the_tokenizer_has_refused():
    counts = torch.tensor([0, 0, 5, 3, 0, 9, 0, 0])
    assert choose_ids(counts, 5, {1}, 7).tolist() == [0, 1, 2, 3, 5]
    assert choose_ids(counts, 2, {1}, 7).tolist() == [1, 5]
    for size in (8, 0):
        with pytest.raises(UserError, match=f"draft.vocabulary {size}"):
            choose_ids(counts, size, {1}, 7)


def test_d07_other_data_makes_another_map():
    tokenizer = AutoTokenizer.from_pretrained(CASES / "_shared" / "tok_small")
    case = json.loads((CASES / "D07" / "expected.json").read_text())
    cuts = []
    for run in ("run1", "run2"):
        rows = read_rows(CASES / "D07" / run / "data.jsonl", tokenizer, Reading(500))
        cuts.append(set(choose_ids(count_tokens(rows, 504), 48, {2}, len(tokenizer)).tolist()))
    assert set(case["ids_only_in_run2_answers"]) <= cuts[1]
    assert not set(case["ids_only_in_run2_answers"]) & cuts[0]


def test_ceilings_are_the_mass_inside_the_cut_and_the_share_of_best_tokens():
    target = make_llama(300, layers=2, seed=0)
    row = Row([5, 9, 30, 41, 90, 7, 2], [False, False, True, True, True, True, True])
    whole = torch.arange(300)
    found = ceilings(Teacher(target), [row], [KEPT, whole], torch.device("cpu"), Law(1.0))
    p = target(torch.tensor([row.ids])).logits[0, 1:-1].softmax(-1)
    assert found[0].alpha_sampled == pytest.approx(p[:, KEPT].sum(-1).mean().item(), rel=1e-5)
    assert found[0].alpha_greedy == pytest.approx(sum(int(best) in KEPT for best in p.argmax(-1)) / 5)
    assert found[0].coverage == pytest.approx(4 / 5)
    assert (found[1].alpha_sampled, found[1].alpha_greedy) == (pytest.approx(1.0), 1.0)


@pytest.fixture(scope="module")
def pair():
    target = make_llama(300, layers=3, seed=0)
    draft = build_lm_draft(target, (0, 1)).eval()
    trim_head(draft, KEPT)
    return target, draft


def test_a_trimmed_draft_speculates_within_its_cut_and_the_output_stays_the_targets(pair):
    target, draft = pair
    assert draft.lm_head.weight.shape[0] == len(KEPT)
    for settings in (Settings(max_new_tokens=40), Settings(Law(0.9), 40, seed=1, seed_exact=True)):
        plain = generate_ids(target, None, [17, 40, 3], settings).token_ids
        answer = generate_ids(target, LMDraft(draft, 300), [17, 40, 3], settings)
        assert answer.token_ids == plain
        assert {token for done in answer.rounds for token in done.drafted} <= set(KEPT.tolist())


def test_its_law_is_that_of_the_whole_head_over_the_cut_renormalised(pair):
    target, draft = pair
    whole = build_lm_draft(target, (0, 1)).eval()
    ids = torch.tensor([[17, 40, 3]])
    expected = whole(ids).logits[..., KEPT].softmax(-1)
    found = Law(1.0)(LMDraft(draft, 300).align(draft(ids).logits))
    torch.testing.assert_close(found[..., KEPT], expected)
    assert found.sum(-1).allclose(torch.ones(1))


def test_the_map_travels_in_the_folder_and_a_stale_one_is_refused(tiny_target, tmp_path):
    target = load_model(str(tiny_target))
    draft = build_lm_draft(target.model, (0,)).eval()
    trim_head(draft, KEPT)
    folder = tmp_path / "draft"
    save_draft(draft, target, "lm", {}, folder)
    loaded = load_model(str(folder))
    assert head_ids(loaded.model).tolist() == KEPT.tolist()
    ids = torch.tensor([[17, 40, 3]])
    torch.testing.assert_close(loaded.model(ids).logits, draft(ids).logits)
    assert LMDraft.of_pair(target, loaded).ids is not None
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == len(KEPT)
    (folder / "config.json").write_text(
        json.dumps(config | {"draftsmith": config["draftsmith"] | {"vocabulary_map_hash": "0" * 16}})
    )
    with pytest.raises(UserError, match="is not the one that its config names"):
        load_model(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 7}))
    with pytest.raises(UserError, match="do not fit its config"):
        load_model(str(folder))
