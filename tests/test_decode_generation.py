"""The decoder on tiny real transformers models, in float32."""

import pytest
import torch
from conftest import make_llama

from configs.errors import UserError
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids, stream_ids
from decode.kv import Reader
from decode.laws import Law
from decode.round import Pair, Rules, play_round
from decode.stops import Stops
from decode.trace import Tally
from decode.verify import VERIFIERS

PROMPTS = [[5], [17, 40, 3], list(range(3, 90)), [9, 9] * 40]


@pytest.fixture(scope="module")
def target():
    return make_llama(vocabulary=120, layers=3, seed=0)


@pytest.fixture(scope="module")
def drafts(target):
    from distill.build import build_lm_draft

    return {
        "part of the target": LMDraft(build_lm_draft(target, (0, 1)).eval()),
        "unrelated": LMDraft(make_llama(vocabulary=120, layers=1, seed=7)),
        "the target itself": LMDraft(target),
    }


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["part of the target", "unrelated", "the target itself"])
def test_greedy_equals_plain_greedy(target, drafts, kind, num_draft_tokens):
    for prompt in PROMPTS:
        settings = Settings(max_new_tokens=50, num_draft_tokens=num_draft_tokens)
        plain = generate_ids(target, None, prompt, settings)
        drafted = generate_ids(target, drafts[kind], prompt, settings)
        assert drafted.token_ids == plain.token_ids


def test_plain_decoding_equals_hf_generate(target):
    for prompt in PROMPTS:
        expected = target.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
        assert (
            generate_ids(target, None, prompt, Settings(max_new_tokens=30)).token_ids
            == expected[0, len(prompt) :].tolist()
        )


def test_a_draft_equal_to_the_target_is_always_accepted(target, drafts):
    answer = generate_ids(target, drafts["the target itself"], [5, 6], Settings(max_new_tokens=21, num_draft_tokens=4))
    assert answer.tally == Tally(rounds=4, drafted=16, accepted=16, emitted=20)
    assert answer.tally.tau == 5.0


def assert_reads_like_a_fresh_prefill(reader: Reader, text: list[int]) -> None:
    fresh = Reader(reader.model)
    fresh.read(torch.tensor([text[: reader.length]]))
    for (keys, values), (fresh_keys, fresh_values) in zip(
        reader.keys_and_values(), fresh.keys_and_values(), strict=True
    ):
        torch.testing.assert_close(keys, fresh_keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, fresh_values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["part of the target", "unrelated", "the target itself"])
@torch.no_grad()
def test_after_every_round_both_caches_equal_a_fresh_prefill_of_the_committed_text(target, drafts, kind, temperature):
    from decode.draws import SeededDraws

    text, law, draws = [17, 40, 3], Law(temperature), SeededDraws(3)
    reader = Reader(target)
    first = draws.choose(law(reader.read(torch.tensor([text]), keep=1)), len(text))
    draft = drafts[kind]
    pair = Pair(reader, torch.tensor([[*text, int(first)]]), draft, draft.start(torch.tensor([text])))
    draft.commit(pair.draft_state, first)
    rules = Rules(law, law, VERIFIERS["block"], draws)
    text.append(int(first))
    accepted = set()
    for num_draft_tokens in [3, 1, 0, 4, 2, 0, 0, 5, 1, 3]:
        done = play_round(pair, num_draft_tokens, rules, keep=len)
        text += done.tokens
        accepted.add(done.accepted)
        assert pair.target.length == len(text) - 1
        assert pair.text.tolist() == [text]
        assert_reads_like_a_fresh_prefill(pair.target, text)
        state = pair.draft_state
        assert state.text.tolist() == [text]
        assert state.reader.length < len(text)
        if state.reader.length:
            assert_reads_like_a_fresh_prefill(state.reader, text)
    assert len(accepted) > 1 or kind == "unrelated"


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_a_sliding_window_is_crossed_without_a_difference(num_draft_tokens):
    """Window 16; the text runs to 70 tokens, so blocks cross the edge and rejected tokens come back out."""
    import transformers

    def sliding(seed):
        torch.manual_seed(seed)
        config = transformers.MistralConfig(
            vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, sliding_window=16, initializer_range=0.2,
        )  # fmt: skip
        return transformers.MistralForCausalLM(config).eval()

    target, draft = sliding(0), LMDraft(sliding(0))
    draft.model.model.layers[1].mlp.down_proj.weight.data *= 0.5
    settings = Settings(max_new_tokens=60, num_draft_tokens=num_draft_tokens)
    prompt = list(range(5, 15))
    expected = target.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None)
    plain, drafted = generate_ids(target, None, prompt, settings), generate_ids(target, draft, prompt, settings)
    assert plain.token_ids == expected[0, 10:].tolist()
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.tally.accepted < drafted.tally.drafted


def test_past_the_drafts_own_context_the_target_goes_on_with_plain_steps(target):
    short = LMDraft(make_llama(vocabulary=120, layers=1, seed=7, context=24))
    settings = Settings(max_new_tokens=40, num_draft_tokens=4)
    for prompt in ([5, 6, 7], list(range(3, 33))):
        answer = generate_ids(target, short, prompt, settings)
        assert answer.token_ids == generate_ids(target, None, prompt, settings).token_ids
        assert not answer.rounds[-3].drafted


@torch.no_grad()
def test_a_cloned_state_goes_its_own_way(target, drafts):
    from decode.draws import SeededDraws

    draft, law = drafts["part of the target"], Law(0.0)
    state = draft.start(torch.tensor([[5, 6, 7]]))
    twin = state.clone()
    first = draft.propose(state, 4, law, SeededDraws(0)).tokens
    draft.commit(state, torch.tensor([[1, 2]]))
    assert torch.equal(draft.propose(twin, 4, law, SeededDraws(0)).tokens, first)


@pytest.mark.parametrize("kind", ["part of the target", "the target itself"])
@pytest.mark.parametrize("place", range(1, 14))
def test_an_end_token_stops_the_answer_at_every_offset_of_the_block(target, drafts, kind, place):
    long = generate_ids(target, None, [17, 40, 3], Settings(max_new_tokens=40)).token_ids
    eos = long[place]
    settings = Settings(max_new_tokens=40, num_draft_tokens=4, stops=Stops((eos, 119)))
    answer = generate_ids(target, drafts[kind], [17, 40, 3], settings)
    assert answer.token_ids == long[: long.index(eos) + 1]
    assert answer.stopped_by == "eos"
    assert sum(len(r.tokens) for r in answer.rounds) == len(answer.token_ids) - 1
    assert all(0 <= r.accepted <= len(r.drafted) and r.accepted <= len(r.tokens) for r in answer.rounds)


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_max_new_tokens_is_exact_and_drafts_no_further(target, drafts, max_new_tokens):
    settings = Settings(max_new_tokens=max_new_tokens, num_draft_tokens=5)
    answer = generate_ids(target, drafts["the target itself"], [5], settings)
    assert len(answer.token_ids) == max_new_tokens
    assert answer.stopped_by == "max_new_tokens"
    left = max_new_tokens - 1
    for r in answer.rounds:
        assert len(r.drafted) <= max(0, left - 1)
        left -= len(r.tokens)


def test_an_answer_ends_where_the_context_ends(target, drafts):
    prompt = [5] * (target.config.max_position_embeddings - 4)
    answer = generate_ids(target, drafts["part of the target"], prompt, Settings(max_new_tokens=30))
    assert (len(answer.token_ids), answer.stopped_by) == (4, "context")


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([5] * 256, "256 tokens; this target holds 256")])
def test_a_prompt_that_cannot_be_answered_is_refused(target, prompt, words):
    with pytest.raises(UserError, match=words):
        generate_ids(target, None, prompt, Settings())


def test_a_draft_length_below_one_is_refused():
    with pytest.raises(UserError, match="expected 1 or more"):
        Settings(num_draft_tokens=0)


def test_a_seed_repeats_its_answer_and_another_seed_does_not(target, drafts):
    def answer(seed):
        settings = Settings(Law(1.0), max_new_tokens=30, seed=seed)
        return generate_ids(target, drafts["part of the target"], [17, 40], settings).token_ids

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_neither_model_nor_the_global_random_state_is_changed(target, drafts):
    draft = drafts["part of the target"]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (target, draft.model)]
    configs = [m.config.to_dict() for m in (target, draft.model)]
    random_state = torch.random.get_rng_state()
    generate_ids(target, draft, [17, 40], Settings(Law(1.0), max_new_tokens=30))
    for model, weights, config in zip((target, draft.model), before, configs, strict=True):
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
        assert model.config.to_dict() == config
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_streaming_yields_the_same_answer_round_by_round(target, drafts):
    settings = Settings(max_new_tokens=25, num_draft_tokens=3)
    lengths = [len(answer.token_ids) for answer in stream_ids(target, drafts["part of the target"], [5, 6], settings)]
    whole = generate_ids(target, drafts["part of the target"], [5, 6], settings)
    assert lengths[0] == 1
    assert lengths[-1] == len(whole.token_ids) == 25
    assert len(lengths) == len(whole.rounds) + 1


class TapReader(LMDraft):
    """Drafts like an LM and notes the target's hidden states that the decoder hands over."""

    taps = (0, 2)

    def start(self, text, hidden, clock):
        self.text, self.hidden = text, hidden
        return super().start(text, hidden, clock)

    def commit(self, state, ids, hidden):
        self.text, self.hidden = torch.cat([self.text, ids], dim=1), torch.cat([self.hidden, hidden], dim=1)
        super().commit(state, ids, hidden)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_is_handed_the_tapped_hidden_states_of_every_committed_token_but_the_last(target, drafts, temperature):
    draft = TapReader(drafts["part of the target"].model)
    settings = Settings(Law(temperature), max_new_tokens=30, num_draft_tokens=4, seed=1)
    answer = generate_ids(target, draft, [17, 40, 3], settings)
    assert draft.text[0].tolist() == [17, 40, 3, *answer.token_ids]
    whole = target(draft.text[:, :-1], output_hidden_states=True).hidden_states
    torch.testing.assert_close(draft.hidden, torch.cat([whole[0], whole[2]], dim=-1), atol=1e-5, rtol=1e-4)


def test_a_sampled_answer_is_told_with_the_seed_that_repeats_it(target, drafts):
    draft = drafts["part of the target"]
    answer = generate_ids(target, draft, [17, 40], Settings(Law(1.0), max_new_tokens=30))
    other = generate_ids(target, draft, [17, 40], Settings(Law(1.0), max_new_tokens=30))
    assert answer.token_ids != other.token_ids
    again = generate_ids(target, draft, [17, 40], Settings(Law(1.0), max_new_tokens=30, seed=answer.seed))
    assert again.token_ids == answer.token_ids
