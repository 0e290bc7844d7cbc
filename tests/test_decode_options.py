"""Stops, processors, seed-exact sampling and draft lengths on tiny real models."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import make_llama
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RepetitionPenaltyLogitsProcessor,
)

from configs.errors import UserError
from decode.compiled import Compiled
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.length import Auto, Costs, Fixed
from decode.processors import Penalties
from decode.stops import Stops, StopWatch, cut_text
from decode.trace import Round

PROMPT = [17, 40, 3]


@pytest.fixture(scope="module")
def target():
    return make_llama(vocabulary=300, layers=3, seed=0)


@pytest.fixture(scope="module")
def draft(target):
    from distill.build import build_lm_draft

    return LMDraft(build_lm_draft(target, (0, 1)).eval())


@pytest.mark.parametrize(
    ("penalties", "processors"),
    [
        (Penalties(repetition_penalty=1.3), [RepetitionPenaltyLogitsProcessor(1.3)]),
        (Penalties(no_repeat_ngram_size=3), [NoRepeatNGramLogitsProcessor(3)]),
        (Penalties(bad_words_ids=((5,), (7, 9))), [NoBadWordsLogitsProcessor([[5], [7, 9]])]),
    ],
)
def test_greedy_with_penalties_equals_transformers_generate(target, draft, penalties, processors):
    settings = Settings(max_new_tokens=40, num_draft_tokens=5, penalties=penalties)
    expected = target.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None,
        logits_processor=LogitsProcessorList(processors),
    )  # fmt: skip
    assert generate_ids(target, draft, PROMPT, settings).token_ids == expected[0, 3:].tolist()
    assert generate_ids(target, None, PROMPT, settings).token_ids == expected[0, 3:].tolist()


def test_a_processor_of_ones_own_sees_the_very_prefix_of_each_place(target, draft):
    seen = []

    def note(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    settings = Settings(Law(0.0, processors=(note,)), max_new_tokens=12, num_draft_tokens=4)
    answer = generate_ids(target, draft, PROMPT, settings)
    text = PROMPT + answer.token_ids
    committed = [prefix for prefix in seen if prefix == text[: len(prefix)]]
    assert {len(prefix) for prefix in committed} >= set(range(3, 3 + 12))
    assert answer.token_ids == generate_ids(target, draft, PROMPT, Settings(max_new_tokens=12)).token_ids


def test_min_new_tokens_forbids_the_end_in_the_first_places_only(target, draft):
    long = generate_ids(target, None, PROMPT, Settings(max_new_tokens=30)).token_ids
    stops = Stops((long[2],))
    early = generate_ids(target, draft, PROMPT, Settings(max_new_tokens=30, stops=stops))
    late = generate_ids(
        target, draft, PROMPT, Settings(max_new_tokens=30, stops=stops, penalties=Penalties(min_new_tokens=9))
    )
    assert len(early.token_ids) <= 3
    assert len(late.token_ids) >= 9
    assert long[2] not in late.token_ids[:9]


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_stop_string_ends_the_answer_at_every_offset_of_the_block(target, draft, tokenizer, place, num_draft_tokens):
    long = generate_ids(target, None, PROMPT, Settings(max_new_tokens=25)).token_ids
    string = tokenizer.decode(long[place : place + 2])
    first = next(n for n in range(1, 26) if string in tokenizer.decode(long[:n]))
    stops = Stops(strings=(string,))
    settings = Settings(max_new_tokens=25, num_draft_tokens=num_draft_tokens, stops=stops)
    for proposer in (None, draft):
        answer = generate_ids(target, proposer, PROMPT, settings, tokenizer)
        assert answer.token_ids == long[:first]
        assert answer.stopped_by == "stop_string"
        assert cut_text(tokenizer.decode(answer.token_ids), stops.strings).endswith(string)
        assert answer.tally.emitted == first - 1


def test_a_criterion_of_ones_own_is_asked_token_by_token(target, draft):
    long = generate_ids(target, None, PROMPT, Settings(max_new_tokens=25)).token_ids

    def seven_tokens(ids, scores):
        return ids.shape[1] - len(PROMPT) == 7

    answer = generate_ids(target, draft, PROMPT, Settings(max_new_tokens=25, stops=Stops(criteria=(seven_tokens,))))
    assert answer.token_ids == long[:7]
    assert answer.stopped_by == "criterion"


def test_stops_that_cannot_work_are_refused(target):
    with pytest.raises(UserError, match="empty stop string"):
        Stops(strings=("",))
    with pytest.raises(UserError, match="need the tokenizer"):
        generate_ids(target, None, PROMPT, Settings(stops=Stops(strings=("x",))))
    assert cut_text("one. two. three", ("two.", "e.")) == "one."
    watch = StopWatch(Stops((9,)), PROMPT, 5, "max_new_tokens", None)
    assert watch.keep([1, 2, 9, 4]) == 3
    assert (watch.reason, watch.left) == ("eos", 2)


@pytest.mark.parametrize("kind", ["half", "itself", "unrelated"])
def test_seed_exact_speculation_equals_sampled_plain_decoding(target, draft, kind):
    other = {"half": draft, "itself": LMDraft(target), "unrelated": LMDraft(make_llama(300, layers=1, seed=9))}[kind]
    for seed in range(6):
        settings = Settings(Law(0.8, top_k=40), max_new_tokens=30, num_draft_tokens=4, seed=seed, seed_exact=True)
        plain, drafted = (generate_ids(target, proposer, PROMPT, settings) for proposer in (None, other))
        assert drafted.token_ids == plain.token_ids
    assert generate_ids(target, None, PROMPT, Settings(Law(0.8), seed=1, seed_exact=True)).token_ids != plain.token_ids


def test_shared_noise_follows_the_law():
    from decode.draws import SharedNoise

    probs = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(1, 4000, 4)
    found = torch.bincount(SharedNoise(0).choose(probs, 0)[0], minlength=4) / 4000
    assert (found - probs[0, 0]).abs().max() < 0.03
    assert SharedNoise(0).choose(probs[:, :1], 7).item() == SharedNoise(0).choose(probs[:, :9], 0)[0, 7].item()


COSTS = Costs(c=0.2, o=0.03, v={1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2})


def played(drafted: int, accepted: int) -> Round:
    n = drafted
    return Round((0,) * n, accepted, (0,) * (accepted + 1), *[(0.5,) * n] * 5, 0.0, 0.0, 0.0, 0.0)


def run_auto(accepts, rounds: int) -> list[int]:
    policy, lengths = Auto(COSTS).start(), []
    for _ in range(rounds):
        length = policy.next_length()
        lengths.append(length)
        policy.learn(played(length, min(length, accepts)))
    return lengths


def test_auto_gives_up_on_a_draft_that_is_never_accepted_and_looks_again_ever_more_seldom():
    lengths = run_auto(accepts=0, rounds=200)
    assert sum(lengths[:10]) <= 8
    tries = [i for i, length in enumerate(lengths) if length and i > 10]
    assert 1 <= len(tries) <= 5
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps)


def test_auto_drafts_as_far_as_the_profile_goes_when_everything_is_accepted():
    assert run_auto(accepts=9, rounds=60)[-1] == 4


def test_auto_forgets_from_call_to_call():
    policy = Auto(COSTS).start()
    before = policy.next_length()
    for _ in range(20):
        policy.learn(played(2, 0))
    assert policy.next_length() == 0
    assert policy.start().next_length() == before


def test_a_profile_with_gaps_or_a_length_below_one_is_refused():
    with pytest.raises(UserError, match="without a gap"):
        Costs(0.1, 0.0, {1: 1.0, 3: 1.2})
    with pytest.raises(UserError, match="expected 1 or more"):
        Fixed(0)
    assert Costs(0.1, 0.0, {1: 1.0, 2: 1.1}).round_cost(0, 1) == 1.0


def test_greedy_output_is_the_same_with_auto_lengths(target, draft):
    plain = generate_ids(target, None, PROMPT, Settings(max_new_tokens=40)).token_ids
    answer = generate_ids(target, draft, PROMPT, Settings(max_new_tokens=40, num_draft_tokens=Auto(COSTS)))
    assert answer.token_ids == plain


def test_an_unknown_verifier_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="token, block, match"):
        Settings(verifier="typical")


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_compiled_pair_decodes_the_same_over_its_fixed_cache(target, draft, num_draft_tokens):
    """torch's own `eager` backend: the graphs, guards and caches of compilation without the code generation."""
    models = [Compiled(model, 90, widest=5, backend="eager") for model in (target, draft.model)]
    for seed in (0, 1):  # the second text finds the cache of the first
        settings = Settings(Law(0.7), 40, num_draft_tokens, seed=seed, seed_exact=True)
        plain = generate_ids(target, None, PROMPT, settings).token_ids
        assert generate_ids(models[0], None, PROMPT, settings).token_ids == plain
        assert generate_ids(models[0], LMDraft(models[1]), PROMPT, settings).token_ids == plain
    long = generate_ids(models[0], LMDraft(models[1]), PROMPT, replace(settings, max_new_tokens=200))
    assert (long.stopped_by, len(long.token_ids)) == ("context", 90 - len(PROMPT))


@pytest.mark.slow
def test_a_pair_compiled_to_code_decodes_the_same(target, draft):
    settings = Settings(Law(0.7), 40, 3, seed=0, seed_exact=True)
    plain = generate_ids(target, None, PROMPT, settings).token_ids
    compiled, drafter = Compiled(target, 90), LMDraft(Compiled(draft.model, 90))
    assert generate_ids(compiled, drafter, PROMPT, settings).token_ids == plain


def test_models_whose_state_cannot_be_taken_back_are_refused_and_short_convolutions_work():
    torch.manual_seed(0)
    common = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    settings = Settings(max_new_tokens=30, num_draft_tokens=4)
    short = Lfm2ForCausalLM(Lfm2Config(num_hidden_layers=3, full_attn_idxs=[1], **common)).eval()
    plain = generate_ids(short, None, PROMPT, settings).token_ids
    assert generate_ids(short, LMDraft(make_llama(300, layers=1, seed=9)), PROMPT, settings).token_ids == plain
    config = Qwen3NextConfig(
        num_hidden_layers=2, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"], **common,
    )  # fmt: skip
    recurrent = Qwen3NextForCausalLM(config).eval()
    assert len(generate_ids(recurrent, None, PROMPT, settings).token_ids) == 30
    with pytest.raises(UserError, match="cannot be taken back"):
        generate_ids(recurrent, LMDraft(make_llama(300, layers=1, seed=9)), PROMPT, settings)
    with pytest.raises(UserError, match="full attention"):
        Compiled(short, 90)
