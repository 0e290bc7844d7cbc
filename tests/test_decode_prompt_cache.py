"""What prompts have in common is read once, and the output does not know of it."""

from time import perf_counter

import pytest
import torch
from conftest import make_llama
from transformers import MistralConfig, MistralForCausalLM

import decode
from configs.errors import UserError
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.lm import LMDraft
from decode.drafts.lookup import LookupDraft, LookupOrDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from decode.prompt_cache import SHORTEST, PromptCache
from decode.stops import Stops
from distill.build import build_eagle3_draft, build_lm_draft

V = 90
HEADER = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]


@pytest.fixture(scope="module")
def target():
    return make_llama(V, layers=3, seed=5)


def drafts(target):
    feature = build_eagle3_draft(target, (0, 1, 3), torch.arange(0, V, 2), 0).eval()
    lm, lookup = LMDraft(build_lm_draft(target, (0, 1)).eval()), LookupDraft(V)
    return {
        "none": None, "lm": lm, "eagle3": Eagle3Draft(feature, target.get_input_embeddings()), "lookup": lookup,
        "lookup+lm": LookupOrDraft(lookup, lm),
    }  # fmt: skip


def facts(answer):
    return answer.token_ids, answer.stopped_by, [(r.drafted, r.accepted, r.tokens) for r in answer.rounds]


@pytest.mark.parametrize("kind", ["none", "lm", "eagle3", "lookup", "lookup+lm"])
@pytest.mark.parametrize("law", [Law(0.0), Law(0.8)], ids=["greedy", "sampled"])
def test_answers_and_rounds_are_those_without_a_cache(target, kind, law):
    draft, settings, cache = drafts(target)[kind], Settings(law, 20, 3, seed=4), PromptCache()
    said = []
    prompts = [[*HEADER, 1, 2, 3], [*HEADER, 1, 2, 3, 4], [*HEADER, 5], [*HEADER[:10], 8, 8], HEADER, [3, 4, 5], HEADER]
    for prompt in prompts:
        alone = generate_ids(target, draft, prompt, settings)
        said.append(facts(generate_ids(target, draft, prompt, settings, cache=cache)))
        assert said[-1] == facts(alone), prompt
    assert cache.prompt_tokens == sum(map(len, prompts))
    assert cache.reused_tokens == 15 + 12 + 10 + 11 + 0 + 11
    turns, text = PromptCache(), list(HEADER)
    for _ in range(4):  # a chat whose earlier turns are all in the next prompt
        answer = generate_ids(target, draft, text, settings, cache=turns)
        assert facts(answer) == facts(generate_ids(target, draft, text, settings))
        text += [*answer.token_ids, 50, 51]
    assert turns.prompt_tokens - turns.reused_tokens == len(HEADER) + 3 * 3, "the last token of an answer is unread"


def test_hit_rate_and_time_saved_are_counted_by_the_pace_of_what_was_read(target):
    cache, ticks = PromptCache(), iter(range(10_000))
    settings = Settings(Law(0.0), 4, 2)
    for prompt in ([*HEADER, 1], [*HEADER, 2]):
        generate_ids(target, None, prompt, settings, clock=lambda: float(next(ticks)), cache=cache)
    assert cache.hit_rate == pytest.approx(12 / 26)
    assert cache.saved_s == pytest.approx(cache.read_s * 12 / 14)
    assert PromptCache().hit_rate is None
    assert PromptCache().saved_s == 0.0


def test_a_short_common_beginning_is_read_again_and_old_texts_go(target):
    cache, settings = PromptCache(size=2), Settings(Law(0.0), 2, 2)
    generate_ids(target, None, [*HEADER[: SHORTEST - 1], 1], settings, cache=cache)
    generate_ids(target, None, [*HEADER[: SHORTEST - 1], 2], settings, cache=cache)
    assert cache.reused_tokens == 0
    generate_ids(target, None, [60] * 10, settings, cache=cache)
    assert len(cache.entries) == 2


def test_another_draft_shares_the_targets_part_and_begins_its_own(target):
    some = drafts(target)
    cache, settings = PromptCache(), Settings(Law(0.0), 12, 3)
    for kind in ("lm", "none", "lookup", "eagle3", "eagle3"):
        answer = generate_ids(target, some[kind], [*HEADER, 9], settings, cache=cache)
        assert facts(answer) == facts(generate_ids(target, some[kind], [*HEADER, 9], settings))
    assert cache.reused_tokens == 12 * 3, "a feature draft needs the target's hidden states too, once"


def test_another_target_gets_nothing_of_the_first_ones(target):
    other, cache, settings = make_llama(V, layers=3, seed=6), PromptCache(), Settings(Law(0.0), 12, 3)
    for model in (target, other, target):
        answer = generate_ids(model, None, [*HEADER, 9], settings, cache=cache)
        assert facts(answer) == facts(generate_ids(model, None, [*HEADER, 9], settings))
    assert cache.reused_tokens == 12


def test_a_draft_that_cannot_go_back_reads_anew(target):
    config = MistralConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, head_dim=8,
    )  # fmt: skip
    draft, cache, settings = LMDraft(MistralForCausalLM(config).eval()), PromptCache(), Settings(Law(0.0), 12, 3)
    for prompt in ([*HEADER, 1, 2, 3], [*HEADER, 4], HEADER):
        answer = generate_ids(target, draft, prompt, settings, cache=cache)
        assert facts(answer) == facts(generate_ids(target, draft, prompt, settings))
    assert cache.reused_tokens == 23


def test_what_the_draft_reads_is_part_of_prefill_with_and_without_a_cache(target):
    read: list[int] = []
    draft = drafts(target)["lm"]
    draft.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    cache, settings = PromptCache(), Settings(Law(0.0), 1, 3)
    for prompt in ([*HEADER, 1, 2], [*HEADER, 3, 4, 5]):
        generate_ids(target, draft, prompt, settings, cache=cache)
    assert read == [14, 3]


def test_an_entry_that_the_draft_has_read_goes_before_one_of_the_target_alone_and_copies_do_not_pile_up(target):
    draft, cache, settings = drafts(target)["lm"], PromptCache(size=4), Settings(Law(0.0), 4, 2)
    for arm in (None, draft, draft, None, draft):
        generate_ids(target, arm, [*HEADER, 9], settings, cache=cache)
    assert len(cache.entries) == 2
    found = cache.find([*HEADER, 9], target, draft, perf_counter)
    assert found.draft_state is not None
    with pytest.raises(UserError, match="expected 1 or more"):
        PromptCache(size=0)


def test_answers_that_ended_in_the_middle_of_a_block_are_kept_up_to_their_end(target):
    draft, settings = drafts(target)["lm"], Settings(Law(1.0), 30, 4, seed=2, stops=Stops(tuple(range(0, V, 7))))
    cache, text = PromptCache(), list(HEADER)
    for _ in range(6):
        answer = generate_ids(target, draft, text, settings, cache=cache)
        assert facts(answer) == facts(generate_ids(target, draft, text, settings))
        text += [*answer.token_ids, 50]
    assert cache.hit_rate > 0.4


def test_a_cache_that_forgets_is_not_kept():
    config = MistralConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, head_dim=8,
    )  # fmt: skip
    model, cache, settings = MistralForCausalLM(config).eval(), PromptCache(), Settings(Law(0.0), 12, 3)
    for prompt in ([*HEADER, 1], [*HEADER, 2]):
        answer = generate_ids(model, None, prompt, settings, cache=cache)
        assert facts(answer) == facts(generate_ids(model, None, prompt, settings))
    assert not cache.entries


def test_a_chat_in_python_keeps_its_earlier_turns(tiny_target, tiny_draft):
    target = load_model(str(tiny_target), "float32")
    draft, cache = decode.load_draft(target, str(tiny_draft), "float32"), decode.PromptCache()
    chat = [{"role": "user", "content": "Who sells warm tea by the old bridge before noon?"}]
    for _ in range(3):
        answer = decode.generate(target, draft, chat, cache=cache, max_new_tokens=8, temperature=0)
        assert answer.token_ids == decode.generate(target, None, chat, max_new_tokens=8, temperature=0).token_ids
        chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    assert cache.hit_rate > 0.4
