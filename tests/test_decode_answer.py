"""decode.generate and decode.stream: words in, words out."""

import json

import pytest

import decode
from configs.errors import UserError
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.length import Auto
from decode.options import DecodeOptions
from decode.stops import Stops
from decode.verify import VERIFIERS


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    target = decode.load_model(str(tiny_target))
    return target, decode.load_draft(target, str(tiny_draft))


def test_an_answer_holds_tokens_text_rounds_and_totals(pair):
    target, draft = pair
    answer = decode.generate(target, draft, "Which clerk?", max_new_tokens=20, num_draft_tokens=4)
    assert answer.text == target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert [*answer.token_ids[:1], *(t for done in answer.rounds for t in done.tokens)] == answer.token_ids
    assert answer.totals.emitted == len(answer.token_ids) - 1
    assert answer.totals.accepted == sum(done.accepted for done in answer.rounds) > 0
    assert all(done.round_s >= done.draft_s + done.verify_s > 0 for done in answer.rounds)
    assert json.loads(json.dumps(answer.as_json()))["statistics"]["tau"] == answer.totals.tau
    assert decode.generate(target, None, "Which clerk?", max_new_tokens=20).token_ids == answer.token_ids


def test_a_turn_a_chat_and_its_ids_are_the_same_prompt(pair):
    target, draft = pair
    chat = [{"role": "user", "content": "Which clerk?"}]
    ids = decode.answer.prompt_ids(target, chat)
    answers = [
        decode.generate(target, draft, prompt, max_new_tokens=9).token_ids for prompt in (chat[0]["content"], chat, ids)
    ]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(UserError, match="one text, one chat"):
        decode.generate(target, draft, ["one prompt", "another"])


def test_a_stream_grows_to_the_same_answer(pair):
    target, draft = pair
    options = {"temperature": 0.8, "seed": 3, "max_new_tokens": 20}
    growing = list(decode.stream(target, draft, "Who?", **options))
    assert [len(answer.rounds) for answer in growing] == list(range(len(growing)))
    assert growing[-1].token_ids == decode.generate(target, draft, "Who?", **options).token_ids


def test_the_text_ends_with_the_stop_string(pair):
    target, draft = pair
    long = decode.generate(target, None, "Who?", max_new_tokens=30)
    string = target.tokenizer.decode(long.token_ids[6:8])
    answer = decode.generate(target, draft, "Who?", max_new_tokens=30, stop=(string,))
    assert answer.stopped_by == "stop_string"
    assert answer.text.endswith(string)


def test_bad_words_biases_and_minimum_reach_the_decoder(pair):
    target, draft = pair
    plain = decode.generate(target, draft, "Who?", max_new_tokens=20)
    word = target.tokenizer.decode(plain.token_ids[4:5])
    banned = decode.generate(target, draft, "Who?", max_new_tokens=20, bad_word=(word,))
    assert plain.token_ids[4] not in banned.token_ids
    biased = decode.generate(target, draft, "Who?", max_new_tokens=20, logit_bias={7: 1e4})
    assert set(biased.token_ids) == {7}
    assert DecodeOptions.model_validate({"logit_bias": ["7=-1.5", "9=2"]}).logit_bias == {7: -1.5, 9: 2.0}


def test_settings_can_say_what_options_cannot_but_not_both(pair):
    target, draft = pair
    settings = Settings(max_new_tokens=10, stops=Stops(criteria=(lambda ids, scores: ids.shape[1] % 7 == 0,)))
    answer = decode.generate(target, draft, "Who?", settings)
    assert answer.stopped_by == "criterion"
    with pytest.raises(UserError, match="not both"):
        decode.generate(target, draft, "Who?", settings, top_k=3)


def test_seed_exact_verifies_by_match_and_nothing_else():
    assert Settings(seed_exact=True).chosen_verifier == "match"
    assert Settings().chosen_verifier == "block"
    with pytest.raises(UserError, match="has no effect"):
        Settings(seed_exact=True, verifier="token")


def test_the_options_name_the_verifiers_there_are():
    for name in VERIFIERS:
        assert DecodeOptions(verifier=name).settings().chosen_verifier == name
    with pytest.raises(ValueError, match="block"):
        DecodeOptions(verifier="typical")


def test_auto_reads_the_profile_of_a_report(pair, tmp_path):
    target, draft = pair
    report = tmp_path / "report.json"
    latency = {"c": 0.1, "o": 0.02, "verify_by_width": {"1": 1.0, "2": 1.1, "3": 1.2}}
    report.write_text(json.dumps({"latency": latency}))
    options = DecodeOptions(num_draft_tokens="auto", latency_profile=report)
    policy = options.settings(target, options.costs()).num_draft_tokens
    assert isinstance(policy, Auto)
    assert policy.costs.v == {1: 1.0, 2: 1.1, 3: 1.2}
    auto = decode.generate(target, draft, "Who?", num_draft_tokens="auto", latency_profile=report, max_new_tokens=30)
    assert auto.token_ids == decode.generate(target, None, "Who?", max_new_tokens=30).token_ids
    assert auto.totals.drafted > 0
    report.unlink()
    with pytest.raises(UserError, match="no such report"):
        options.costs()
    report.write_text("{}")
    with pytest.raises(UserError, match="holds no latency profile"):
        options.costs()
    with pytest.raises(UserError, match="no effect without"):
        DecodeOptions(latency_profile=report).settings()


def test_hf_generate_follows_a_law_with_penalties_too(pair):
    """The baseline of a report runs under the same law, in the same order."""
    from decode.hf import hf_generate
    from decode.processors import Penalties

    target, _ = pair
    settings = Settings(max_new_tokens=30, penalties=Penalties(repetition_penalty=1.4, presence_penalty=0.5))
    law = settings.target_law(2, target.model.device)
    (hf,) = hf_generate(target.model, [[5, 9]], law, 30, (), seed=0)
    assert hf == generate_ids(target.model, None, [5, 9], settings).token_ids
    sampling = Settings(Law(0.7, top_k=1), max_new_tokens=12, penalties=Penalties(presence_penalty=2.0))
    (hf,) = hf_generate(target.model, [[5, 9]], sampling.target_law(2, target.model.device), 12, (), seed=0)
    assert hf == generate_ids(target.model, None, [5, 9], sampling).token_ids


def test_template_arguments_reach_the_prompt_and_compile_is_refused_for_one_call(tiny_target):
    target = decode.load_model(str(tiny_target))
    target.tokenizer.chat_template += "{% if loud and add_generation_prompt %}LOUD{% endif %}"
    plain, loud = (
        decode.generate(target, None, "Who?", max_new_tokens=9, template_argument=arguments).token_ids
        for arguments in ({}, {"loud": True})
    )
    assert plain != loud
    with pytest.raises(UserError, match=r"decode\.compiled\.Compiled"):
        decode.generate(target, None, "Who?", compile=True)
    with pytest.raises(ValueError, match="not valid YAML"):
        DecodeOptions.model_validate({"template_argument": ["a=[1"]})


def test_a_chat_in_another_tools_words_is_understood(pair):
    target, _ = pair
    ours, theirs = (
        decode.answer.prompt_ids(target, [turn])
        for turn in ({"role": "user", "content": "Who?"}, {"role": "human", "content": "Who?"})
    )
    assert ours == theirs
