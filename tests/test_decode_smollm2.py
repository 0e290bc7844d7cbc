"""The real target, in float32: speculative greedy equals plain greedy."""

import json
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch

from decode.chat import render_chat, render_prompt
from decode.drafts.lm import LMDraft
from decode.draws import SharedNoise
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from decode.stops import Stops
from eval.certificate import NEAR_TIE_FP32, tie_gap
from eval.suites import find_prompts, read_prompts, stratified
from eval.text import first_difference

pytestmark = pytest.mark.smollm2
SUITE = read_prompts(find_prompts("suite"))
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def target(smollm2):
    return load_model(str(smollm2), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def draft(smollm2) -> LMDraft:
    """The target with every weight moved a little, in bfloat16: a cheap draft, often right and often wrong."""
    draft = load_model(str(smollm2), dtype="float32", device="cpu").model
    generator = torch.Generator().manual_seed(0)
    for weight in draft.model.layers.parameters():
        if weight.ndim == 2:
            weight += 0.07 * weight.std() * torch.randn(weight.shape, generator=generator)
    return LMDraft(draft.bfloat16())


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
def test_greedy_equals_plain_greedy_on_forty_prompts_of_thirty_two_tokens(target, draft, part):
    """A difference may stand only where the two best logits are within 1e-4; such near-ties are counted."""
    check_equality(target, draft, stratified(SUITE, 40)[10 * part : 10 * (part + 1)], Settings(max_new_tokens=32))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_greedy_equals_plain_greedy_on_a_hundred_prompts_of_thirty_two_tokens(target, draft, part):
    check_equality(target, draft, stratified(SUITE, 100)[10 * part : 10 * (part + 1)], Settings(max_new_tokens=32))


SEED_EXACT = Settings(Law(0.8, top_p=0.95), max_new_tokens=32, seed_exact=True)


def test_seed_exact_sampling_equals_the_sampled_plain_run_on_two_prompts(target, draft):
    check_equality(target, draft, stratified(SUITE, 2), SEED_EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_seed_exact_sampling_equals_the_sampled_plain_run_on_forty_prompts(target, draft, part):
    check_equality(target, draft, stratified(SUITE, 40)[10 * part : 10 * (part + 1)], SEED_EXACT)


def check_equality(target, draft, prompts, settings) -> None:
    near_ties, accepted, drafted, compared = [], 0, 0, 0
    for number, prompt in enumerate(prompts):
        ids = render_prompt(target.tokenizer, prompt.messages)
        asked = replace(settings, num_draft_tokens=1 + number % 4, stops=Stops(target.eos_ids), seed=number)
        plain = generate_ids(target.model, None, ids, asked).token_ids
        answer = generate_ids(target.model, draft, ids, asked)
        accepted, drafted = accepted + answer.tally.accepted, drafted + answer.tally.drafted
        compared += len(plain)
        at = first_difference(plain, answer.token_ids)
        if at is not None:
            assert closeness(target.model, ids, plain, answer.token_ids, at, asked) < NEAR_TIE_FP32, prompt.id
            near_ties.append(prompt.id)
    print(f"{compared} tokens, {accepted} of {drafted} drafted accepted, near-ties: {near_ties}")
    assert len(near_ties) <= 1
    assert compared > 25 * len(prompts) * 0.8
    assert 0.2 < accepted / drafted < 0.95  # both branches were walked


def closeness(model, ids, plain, other, at, settings) -> float:
    """Gap of the two tokens' scores where greedy; with shared noise, of score plus noise in units of the law's log."""
    if settings.law.is_greedy or at >= min(len(plain), len(other)):
        return tie_gap(model, ids, plain, other, at, settings).gap
    text = torch.tensor([ids + plain[:at]])
    noisy = SharedNoise(settings.seed).scores(settings.law(model(text).logits[:, -1:], text), len(ids) + at)[0, 0]
    return float((noisy[plain[at]] - noisy[other[at]]).abs())


def test_the_template_of_smollm2_has_no_generation_marks_and_is_masked_right_all_the_same(target):
    chat = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The clerk."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Before noon."},
    ]
    rendered = render_chat(target.tokenizer, chat)
    kept = [token for token, mark in zip(rendered.ids, rendered.is_answer, strict=True) if mark]
    assert target.tokenizer.decode(kept) == "The clerk.<|im_end|>Before noon.<|im_end|>"
    assert "You are a helpful AI assistant named SmolLM" in target.tokenizer.decode(rendered.ids)


def test_the_folder_says_what_its_weights_are(smollm2):
    said = json.loads((smollm2 / "PROVENANCE.json").read_text())
    assert "Q4_1" in said["weights"]
    assert said["license"] == "apache-2.0"
    assert (smollm2 / "LICENSE").read_text().strip().startswith("Apache License")
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())


def test_a_damaged_download_is_refused(tmp_path):
    loader = SourceFileLoader("get_smollm2", str(ROOT / "scripts" / "get_smollm2"))
    script = module_from_spec(spec_from_loader("get_smollm2", loader))
    loader.exec_module(script)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match="expected b179c952"):
        script.check_sha256(tmp_path / "model.gguf")
