"""Texts decoded together get what each of them gets alone: tokens, rounds, ends."""

import json

import pytest
import torch
from conftest import CASES, make_llama
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import decode
from configs.errors import UserError
from decode.batch import generate_batch_ids
from decode.batch_reader import BatchReader, right_aligned
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.lm import LMDraft
from decode.drafts.lookup import LookupDraft, LookupOrDraft
from decode.generation import Settings, generate_ids
from decode.kv import Reader
from decode.laws import Law
from decode.length import Auto, Costs
from decode.models import load_model
from decode.processors import Penalties
from decode.stops import Stops
from distill.build import build_eagle3_draft, build_lm_draft

V = 90
PROMPTS = [[5, 9, 30, 41, 7], [3], [5, 9, 30] * 6, [8, 8], [60, 2, 61, 2, 62, 2, 63]]
AUTO = Auto(Costs(0.05, 0.02, {n: 1.0 + 0.03 * n for n in range(1, 6)}))


@pytest.fixture(scope="module")
def target():
    return make_llama(V, layers=3, seed=5)


def drafts(target):
    lm = LMDraft(build_lm_draft(target, (0, 1)).eval())
    feature = build_eagle3_draft(target, (0, 1, 3), torch.arange(0, V, 2), 0).eval()
    lookup = LookupDraft(V)
    return {
        "none": None, "lm": lm, "itself": LMDraft(target), "lookup": lookup, "lookup+lm": LookupOrDraft(lookup, lm),
        "eagle3": Eagle3Draft(feature, target.get_input_embeddings()),
    }  # fmt: skip


def facts(answer):
    return answer.token_ids, answer.stopped_by, [(r.drafted, r.accepted, r.tokens) for r in answer.rounds]


SETTINGS = {
    "greedy": Settings(Law(0.0), 30, 3),
    "sampled": Settings(Law(0.9, top_p=0.95), 30, 2, seed=11),
    "token verifier": Settings(Law(0.7), 24, 4, seed=3, verifier="token"),
    "ends": Settings(Law(1.0), 40, 3, seed=5, stops=Stops(tuple(range(0, V, 9)))),
    "auto": Settings(Law(0.0), 30, AUTO),
    "penalties": Settings(Law(0.8), 20, 2, seed=1, penalties=Penalties(repetition_penalty=1.4)),
    "shared noise": Settings(Law(0.8), 20, 3, seed=7, seed_exact=True),
    "one token": Settings(Law(0.0), 1, 3),
}


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("kind", ["none", "lm", "itself", "eagle3", "lookup", "lookup+lm"])
def test_each_text_gets_what_it_gets_alone(target, kind, how):
    settings, draft = SETTINGS[how], drafts(target)[kind]
    together = generate_batch_ids(target, draft, PROMPTS, settings)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, together, strict=True)):
        seed = None if settings.seed is None else settings.seed + i
        alone = generate_ids(target, draft, prompt, Settings(**{**vars(settings), "seed": seed}))
        assert facts(answer) == facts(alone), prompt
        assert answer.seed == (answer.seed if seed is None else seed)
    if how == "ends":
        assert len({len(answer.token_ids) for answer in together}) > 2, "rows end at different times"


def test_a_batch_of_one_and_of_none(target):
    settings = SETTINGS["greedy"]
    (answer,) = generate_batch_ids(target, LMDraft(target), PROMPTS[:1], settings)
    assert facts(answer) == facts(generate_ids(target, LMDraft(target), PROMPTS[0], settings))
    assert generate_batch_ids(target, None, [], settings) == []


def test_seconds_of_all_texts_add_up_to_those_that_passed(target):
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    answers = generate_batch_ids(target, LMDraft(target), PROMPTS, SETTINGS["ends"], clock=clock)
    rounds = max(len(answer.rounds) for answer in answers)
    whole = sum(answer.decode_s + answer.prefill_s for answer in answers)
    assert now[0] - rounds - 1 <= whole <= now[0], "between two rounds one tick passes"
    for answer in answers:
        assert answer.decode_s == pytest.approx(sum(done.round_s for done in answer.rounds))
        assert all(done.draft_s + done.verify_s <= done.round_s for done in answer.rounds)


@pytest.mark.parametrize("kind", ["lm", "eagle3"])
def test_texts_that_the_drafts_context_cannot_hold_decode_plainly_beside_others(target, kind):
    draft = drafts(target)[kind]
    draft.context_tokens = 16
    settings = SETTINGS["greedy"]
    for prompts in (PROMPTS, [PROMPTS[2]] * 2):
        together = generate_batch_ids(target, draft, prompts, settings)
        for prompt, answer in zip(prompts, together, strict=True):
            assert facts(answer) == facts(generate_ids(target, draft, prompt, settings)), prompt


def test_rope_that_depends_on_the_longest_text_is_refused():
    model = make_llama(V, layers=1, seed=0)
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(UserError, match="longrope"):
        BatchReader(model, 2)


@pytest.mark.parametrize("prompts", ["hello", [1, 2, 3]])
def test_one_prompt_where_several_are_expected_is_refused(tiny_target, prompts):
    with pytest.raises(UserError, match="expected a list of prompts"):
        decode.generate_batch(load_model(str(tiny_target)), None, prompts)


def test_logits_are_those_of_a_text_of_its_own_after_ragged_reading_and_taking_back(target):
    """In float64, so that nothing but a mistake can differ."""
    model, generator = make_llama(V, layers=2, seed=3).double(), torch.Generator().manual_seed(0)
    batch, alone = BatchReader(model, 3), [Reader(model) for _ in range(3)]
    for _ in range(12):
        chunks = [torch.randint(V, (int(n),), generator=generator).tolist() for n in torch.randint(0, 5, (3,))]
        if not all(chunks):
            chunks = [[1, *chunk] for chunk in chunks]
        ids, fresh = right_aligned(chunks, torch.device("cpu"))
        with torch.no_grad():
            found = batch.read(ids, fresh, keep=1)
            for i, chunk in enumerate(chunks):
                torch.testing.assert_close(found[i : i + 1], alone[i].read(torch.tensor([chunk]), keep=1))
        lengths = [max(1, reader.length - int(n)) for reader, n in zip(alone, torch.randint(0, 4, (3,)), strict=True)]
        batch.rewind(torch.tensor(lengths))
        for reader, length in zip(alone, lengths, strict=True):
            reader.rewind(length)
    assert batch.lengths.tolist() == [reader.length for reader in alone]
    assert batch.held.shape[1] < 1.5 * max(reader.length for reader in alone), "what nobody needs is squeezed out"


def test_models_whose_cache_forgets_are_refused_by_name():
    config = MistralConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, head_dim=8,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with pytest.raises(UserError, match="Sliding"):
        generate_batch_ids(model, None, PROMPTS, SETTINGS["greedy"])


def test_c10_two_prompts_of_different_length_together_are_each_what_they_are_alone():
    target = load_model(str(CASES / "_shared" / "target_ctx"), "float32", "cpu")
    draft = LMDraft(AutoModelForCausalLM.from_pretrained(CASES / "_shared" / "draft_ctx").eval())
    prompts = json.loads((CASES / "C01" / "scenario.json").read_text())["prompts"]
    answers = decode.generate_batch(target, draft, prompts, max_new_tokens=40, num_draft_tokens=3)
    assert len({len(prompt) for prompt in prompts}) > 1
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = decode.generate(target, draft, prompt, max_new_tokens=40, num_draft_tokens=3)
        assert answer.token_ids == alone.token_ids
        assert answer.totals.accepted == alone.totals.accepted
        assert answer.text == alone.text


def test_one_text_that_cannot_be_decoded_is_named(target):
    with pytest.raises(UserError, match="the prompt is empty"):
        generate_batch_ids(target, None, [[1], []], SETTINGS["greedy"])
