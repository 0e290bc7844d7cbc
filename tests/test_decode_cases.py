"""Faults that users of such decoders met: small inputs with the right behaviour, in tests/cases."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import CASES
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import decode
from configs.errors import UserError
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids, stream_ids
from decode.laws import Law
from decode.models import load_model
from decode.processors import Penalties
from decode.stops import Stops
from eval.certificate import tie_gap
from eval.text import first_difference

SHARED = CASES / "_shared"


def shared(name: str, dtype: str = "float32"):
    return load_model(str(SHARED / name), dtype, "cpu")


def read(case: str, name: str = "expected.json"):
    return json.loads((CASES / case / name).read_text())


@pytest.mark.parametrize("name", ["draft_ctx", "draft_tiny", "target_ctx"])
def test_c01_greedy_equals_plain_whatever_the_prompt_length_and_draft(name):
    case = read("C01", "scenario.json")
    target, draft = shared("target_ctx").model, LMDraft(shared(name).model)
    for prompt in case["prompts"]:
        plain = generate_ids(target, None, prompt, Settings(max_new_tokens=case["new_tokens"])).token_ids
        for length in case["draft_lengths"]:
            settings = Settings(max_new_tokens=case["new_tokens"], num_draft_tokens=length)
            assert generate_ids(target, draft, prompt, settings).token_ids == plain


@pytest.mark.parametrize("length", [1, 4, 7])
def test_c05_past_a_sliding_window_ids_and_accepted_counts_are_those_of_full_passes(length):
    """The case's first round follows the prompt at once; ours follows prefill's token, which it had drafted rightly."""
    case = read("C05")
    target, draft = shared("target_sliding").model, LMDraft(shared("draft_sliding").model)
    settings = Settings(max_new_tokens=case["new_tokens"], num_draft_tokens=length)
    answer = generate_ids(target, draft, case["prompt_ids"], settings)
    expected = case["by_draft_length"][str(length)]
    assert answer.token_ids == case["plain_greedy_ids"]
    rounds = [[len(done.drafted), done.accepted] for done in answer.rounds]
    (_, first), *later = expected["rounds_drafted_accepted"]
    assert first == 1
    assert rounds == [[length, 0], *later]
    assert answer.tally.accepted == expected["accepted"] - first


def test_c05_a_target_as_its_own_draft_accepts_everything_past_the_window():
    case = read("C05")
    target = shared("target_sliding").model
    settings = Settings(max_new_tokens=case["new_tokens"], num_draft_tokens=4)
    answer = generate_ids(target, LMDraft(target), case["prompt_ids"], settings)
    assert answer.tally.accepted == answer.tally.drafted
    assert len(answer.rounds) == case["target_as_its_own_draft"]["target_passes"]


def test_c02_equal_best_logits_resolve_to_the_lowest_id_one_token_or_many_at_a_time():
    case = read("C02")
    target = load_model(str(CASES / "C02" / "tie_target"), "float32", "cpu")
    first, *_ = case["tied_tokens"]
    prompt = target.tokenizer("ant", add_special_tokens=False).input_ids
    plain = generate_ids(target.model, None, prompt, Settings(max_new_tokens=20)).token_ids
    assert target.tokenizer.convert_ids_to_tokens(plain[0]) == first
    for name, length in (("target itself", 3), ("markov_draft", 1), ("markov_draft", 4)):
        draft = LMDraft(target.model if name == "target itself" else shared(name).model)
        settings = Settings(max_new_tokens=20, num_draft_tokens=length)
        assert generate_ids(target.model, draft, prompt, settings).token_ids == plain


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_c02_a_difference_is_told_with_its_place_and_gap_and_only_half_precision_has_any(dtype):
    target, draft = (shared(name).model.to(getattr(torch, dtype)) for name in ("target_ctx", "draft_ctx"))
    settings = Settings(max_new_tokens=48, num_draft_tokens=4)
    for seed in range(6):
        prompt = torch.randint(4, 400, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        plain, ours = (generate_ids(target, arm, prompt, settings).token_ids for arm in (None, LMDraft(draft)))
        at = first_difference(plain, ours)
        if dtype != "bfloat16":
            assert at is None
        elif at is not None:
            tie = tie_gap(target, prompt, plain, ours, at, settings)
            assert tie.gap <= tie.bound


LAWS = {"temperature_1": Law(1.0), "temperature_0.5": Law(0.5), "temperature_1_top_k_2": Law(1.0, top_k=2)}


def first_two_tokens(law: Law, draft_temperature: float | None, verifier: str, runs: int) -> Counter:
    """Counts over `runs` seeds of the answer's first two tokens: prefill's, and the first of the first round."""
    target, draft = shared("markov_target"), LMDraft(shared("markov_draft").model)
    prompt = target.tokenizer.convert_tokens_to_ids(["<bos>", "ant"])
    stops = Stops(target.eos_ids)
    found: Counter = Counter()
    for seed in range(runs):
        settings = Settings(law, 5, 3, stops, seed, verifier, draft_temperature=draft_temperature)
        for answer in stream_ids(target.model, draft, prompt, settings):
            if len(answer.token_ids) > 1:
                break
        found[" ".join(target.tokenizer.convert_ids_to_tokens(answer.token_ids[:2]))] += 1
    return found


def check_law(name: str, draft_temperature: float | None, verifier: str, runs: int) -> None:
    expected = read("C03")["law_of_the_first_two_new_tokens"][name]
    found = first_two_tokens(LAWS[name], draft_temperature, verifier, runs)
    assert set(found) <= set(expected)
    common = [pair for pair, p in expected.items() if p * runs >= 5]
    rare = runs - sum(found[pair] for pair in common), runs * (1 - sum(expected[pair] for pair in common))
    counts = [found[pair] for pair in common] + ([rare[0]] if rare[1] > 1 else [])
    wanted = [runs * expected[pair] for pair in common] + ([rare[1]] if rare[1] > 1 else [])
    scale = sum(counts) / sum(wanted)
    assert chisquare(counts, [scale * count for count in wanted]).pvalue > 0.001


@pytest.mark.parametrize(
    ("name", "draft_temperature", "verifier"),
    [("temperature_1", None, "block"), ("temperature_0.5", 2.0, "token"), ("temperature_1_top_k_2", 0.0, "match")],
)
def test_c03_the_first_two_tokens_follow_the_known_law(name, draft_temperature, verifier):
    check_law(name, draft_temperature, verifier, runs=300)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "match"])
@pytest.mark.parametrize("draft_temperature", [None, 0.0, 2.0])
@pytest.mark.parametrize("name", LAWS)
def test_c03_the_first_two_tokens_follow_the_known_law_in_twenty_thousand_runs(name, draft_temperature, verifier):
    check_law(name, draft_temperature, verifier, runs=20_000)


PROMPTS = {"one": ["<bos>", "ant"], "other": ["<bos>", "elk", "cat"]}


def test_c07_a_seed_belongs_to_its_request_in_any_order_and_no_seed_never_repeats():
    case = read("C07", "scenario.json")["settings"]
    target, draft = shared("markov_target"), LMDraft(shared("markov_draft").model)
    ids = {name: target.tokenizer.convert_tokens_to_ids(words) for name, words in PROMPTS.items()}

    def run(name, seed):
        settings = Settings(Law(case["temperature"]), case["new_tokens"], 3, seed=seed)
        return generate_ids(target.model, draft, ids[name], settings)

    for seed in case["seeds"]:
        first = {name: run(name, seed).token_ids for name in ("one", "other")}
        torch.manual_seed(99)
        run("one", 77)
        assert {name: run(name, seed).token_ids for name in ("other", "one")} == first
    unseeded = [run("one", None) for _ in range(4)]
    assert len({tuple(answer.token_ids) for answer in unseeded}) > 1
    repeated = run("one", unseeded[0].seed)  # the seed that was drawn is told
    assert repeated.token_ids == unseeded[0].token_ids


def test_c07_a_seed_gives_the_same_text_in_another_process():
    arguments = ["--target", SHARED / "markov_target", "--draft", SHARED / "markov_draft", "--prompt", "ant", "--raw",
                 "--temperature", 1, "--max-new-tokens", 24, "--seed", 3, "--json"]  # fmt: skip
    command = [sys.executable, "-m", "decode", *map(str, arguments)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    target, draft = shared("markov_target"), LMDraft(shared("markov_draft").model)
    options = {"temperature": 1.0, "max_new_tokens": 24, "seed": 3}
    here = decode.generate(target, draft, target.tokenizer("ant").input_ids, **options)
    assert json.loads(done.stdout)["token_ids"] == here.token_ids


def c09_settings():
    return [{k: v for k, v in setting.items() if k != "note"} for setting in read("C09")["settings"]]


@pytest.mark.parametrize("setting", c09_settings()[:4], ids=str)
@pytest.mark.parametrize("length", [1, 5])
def test_c09_greedy_under_each_setting_equals_plain_decoding_and_transformers(setting, length):
    target, draft = shared("target_ctx"), LMDraft(shared("draft_ctx").model)
    for prompt in ([5], [261, 373, 375, 343, 347]):
        penalties = Penalties(**setting)
        settings = Settings(Law(), 40, length, penalties=penalties, stops=Stops(target.eos_ids))
        plain, ours = (generate_ids(target.model, arm, prompt, settings).token_ids for arm in (None, draft))
        hf = target.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, **setting)
        assert ours == plain == hf[0, len(prompt) :].tolist()


def test_c09_temperature_and_top_p_reach_both_laws():
    """The law itself is enumerated in test_decode_enumeration.py; here: what is emitted lies in the nucleus."""
    target, draft = shared("target_ctx"), LMDraft(shared("draft_ctx").model)
    law = Law(c09_settings()[4]["temperature"], top_p=c09_settings()[4]["top_p"])
    answer = generate_ids(target.model, draft, [5], Settings(law, 40, 4, seed=2))
    ids = torch.tensor([[5, *answer.token_ids]])
    p = law(target.model(ids).logits[:, :-1])
    assert (p.gather(-1, ids[:, 1:, None]) > 0).all()
    assert all(q > 0 for done in answer.rounds for q in done.q)


def test_c09_a_setting_that_cannot_be_honoured_is_refused_by_name():
    target = shared("target_ctx")
    for options, words in [
        ({"guidance_scale": 2.0}, "unknown key 'guidance_scale'"),
        ({"top_pp": 0.5}, "did you mean 'top_p'"),
        ({"top_k": 3}, "no effect at temperature 0"),
        ({"logit_bias": {9999: 1.0}}, "logit_bias 9999"),
        ({"bad_word": ("",)}, "bad_word ''"),
        ({"num_draft_tokens": "auto"}, "needs latency_profile"),
    ]:
        with pytest.raises(UserError, match=words):
            decode.generate(target, None, [5, 9], **options)


def test_t01_padded_heads_over_one_tokenizer_pair_and_never_emit_a_padding_id(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tok_small")

    def model(config: str, seed: int):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CASES / "T01" / config))
        made.lm_head.weight.data[len(tokenizer) :] *= 50  # padding rows that would often win
        made.save_pretrained(tmp_path / config)
        tokenizer.save_pretrained(tmp_path / config)
        return load_model(str(tmp_path / config), "float32", "cpu")

    target, draft = model("target_config.json", 0), model("draft_config.json", 1)
    for temperature in (0.0, 1.5):
        options = {"temperature": temperature, "max_new_tokens": 60, "seed": 1}
        answer = decode.generate(target, LMDraft.of_pair(target, draft), [5, 9], **options)
        assert max(answer.token_ids) < len(tokenizer)
        assert all(max(done.drafted, default=0) < len(tokenizer) for done in answer.rounds)
        if temperature == 0:
            assert answer.token_ids == decode.generate(target, None, [5, 9], **options).token_ids
    with pytest.raises(UserError, match=r"440 vocabulary rows.* 512, .* 450 entries"):
        LMDraft.of_pair(target, model("draft_too_small_config.json", 2))


def test_t03_another_tokenizer_is_refused_before_any_model_runs(tmp_path):
    other = tmp_path / "other"
    shared("draft_tiny").model.save_pretrained(other)
    AutoTokenizer.from_pretrained(CASES / "T03" / "tok_bytes").save_pretrained(other)
    with pytest.raises(UserError, match=r"different tokenizers.*use a draft made for this target"):
        decode.load_draft(shared("target_ctx"), str(other))


def test_t04_another_end_token_is_taken_with_a_warning_and_the_targets_rule_counts(tmp_path):
    target, other = shared("target_ctx"), tmp_path / "other"
    made = shared("draft_ctx").model
    made.generation_config.eos_token_id = made.config.eos_token_id = read("T04")["eos_other"]
    made.save_pretrained(other)
    AutoTokenizer.from_pretrained(CASES / "T04" / "tok_other_special").save_pretrained(other)
    with pytest.warns(UserWarning, match="the target's rule counts"):
        draft = decode.load_draft(target, str(other))
    for prompt in ([5], [68], [261, 373]):
        plain, ours = (decode.generate(target, arm, prompt, max_new_tokens=60) for arm in (None, draft))
        assert ours.token_ids == plain.token_ids
        assert ours.stopped_by == plain.stopped_by
