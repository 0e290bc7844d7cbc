"""A quantised target is a target of its own: decoding is lossless against it, and its revision says what it is."""

import copy
import shutil
from importlib.util import find_spec

import pytest
import torch
from conftest import make_llama

from configs.errors import UserError
from decode.answer import generate, prompt_ids
from decode.drafts.kinds import load_draft
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from decode.options import DecodeOptions
from decode.quantise import in_float32, is_packed, numbers, quantise, quantised, stored_bytes

LIBRARIES = {"int8": "torchao", "nf4": "bitsandbytes"}
IDS = torch.arange(3, 40).unsqueeze(0)


@pytest.fixture(scope="module")
def plain():
    return make_llama(90, layers=3, seed=5, width=64).bfloat16()


@pytest.fixture(scope="module", params=["int8", "nf4"])
def packed(plain, request):
    pytest.importorskip(LIBRARIES[request.param])
    model = copy.deepcopy(plain)
    quantise(model, request.param)
    return model


def one_layer(plain, precision):
    """A weight as it was [N, D], packed, and its values in float32; the embeddings stay as they are."""
    pytest.importorskip(LIBRARIES[precision])
    model = copy.deepcopy(plain)
    quantise(model, precision)
    assert not is_packed(model.model.embed_tokens.weight)
    weight, found, values = (
        one.model.layers[0].mlp.up_proj.weight for one in (plain, model, in_float32(model))
    )  # fmt: skip
    assert is_packed(found)
    assert numbers(found) == weight.numel()
    return weight, found, values


def test_linear_weights_are_int8_with_one_scale_a_row(plain):
    weight, found, values = one_layer(plain, "int8")
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert ((values - weight).abs() <= step * 0.75 + 4e-3 * weight.abs()).all()
    assert stored_bytes(found) < 0.6 * stored_bytes(weight)


def test_linear_weights_are_nf4_with_one_scale_for_64(plain):
    """Of 16 values for each scale, the nearest; no two of them lie further apart than 0.31 of the largest weight."""
    weight, found, values = one_layer(plain, "nf4")
    blocks = weight.float().view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    assert ((values.view(-1, 64) - blocks).abs() <= 0.155 * scale + 4e-3 * blocks.abs()).all()
    assert len((values.view(-1, 64) / scale).mul(100).round().unique()) <= 3 * 16
    assert stored_bytes(found) < 0.35 * stored_bytes(weight)


def test_a_copy_in_float32_computes_what_the_quantised_model_does(packed):
    twin = in_float32(packed)
    assert all(not is_packed(weight) and weight.dtype == torch.float32 for weight in twin.parameters())
    assert torch.equal(twin.model.rotary_emb.inv_freq, packed.model.rotary_emb.inv_freq)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, torch.nn.Linear) and module.in_features == 64:
                found, expected = module(x.bfloat16()).float(), twin.get_submodule(name)(x.bfloat16().float())
                torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
        assert (twin(IDS).logits - packed(IDS).logits.float()).abs().max() < 0.5
    assert is_packed(packed.lm_head.weight), "the model itself is as it was"


@pytest.mark.parametrize("precision", LIBRARIES)
def test_a_quantised_encoder_decoder_model_computes_what_its_copy_in_float32_does(tiny_t5, precision):
    """T5's feed-forward layers cast what goes in to the stored dtype of one of their weights."""
    pytest.importorskip(LIBRARIES[precision])
    model = quantised(load_model(str(tiny_t5), "float32"), precision).model
    text = torch.tensor([[20, 21, 22, 1, 30, 31, 32, 33]])
    found, expected = (one(input_ids=text).logits for one in (model, in_float32(model)))
    torch.testing.assert_close(found, expected, atol=1e-2 * float(expected.std()), rtol=1e-2)


def test_speculation_equals_plain_decoding_of_the_quantised_target_in_float32(plain, packed):
    target, settings = in_float32(packed), Settings(Law(0.0), 40, 3)
    other = plain.float()
    answer = generate_ids(target, LMDraft(other), [5, 9, 30], settings)
    assert answer.token_ids == generate_ids(target, None, [5, 9, 30], settings).token_ids
    assert answer.tally.accepted > 5


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_quantised_draft_still_drafts_for_a_quantised_target(tiny_target, tiny_draft, precision):
    pytest.importorskip(LIBRARIES[precision])
    target = load_model(str(tiny_target), "bfloat16")
    draft = load_draft(target, str(tiny_draft), "bfloat16")
    asked = DecodeOptions(quantize_target=precision, quantize_draft=precision, temperature=0, max_new_tokens=24)
    target = asked.quantised(target, draft)
    assert target.revision.endswith(f"+{precision}")
    assert is_packed(draft.model.lm_head.weight)
    exact = draft.in_float32()
    assert all(not is_packed(weight) for weight in exact.model.parameters())
    whole = in_float32(target.model)
    settings = Settings(Law(0.0), 24, 3)
    ids = prompt_ids(target, "warm tea")
    answer = generate_ids(whole, exact, ids, settings)
    assert answer.token_ids == generate_ids(whole, None, ids, settings).token_ids


def test_what_cannot_be_quantised_is_said(tiny_target, monkeypatch):
    target = load_model(str(tiny_target), "bfloat16")
    with pytest.raises(UserError, match="no effect on a draft without weights"):
        DecodeOptions(quantize_draft="int8").quantised(target, load_draft(target, "lookup"))
    if not torch.accelerator.is_available() and find_spec("torchao"):
        with pytest.raises(UserError, match=r"int4: torchao (cannot do it on this cpu|leaves) .*try int8"):
            quantised(target, "int4")
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.nn", None)
    for precision, library in (("int8", "torchao"), ("nf4", "bitsandbytes")):
        with pytest.raises(UserError, match=f"needs {library}"):
            quantised(target, precision)


def test_python_calls_are_told_to_quantise_the_models_themselves(tiny_target):
    with pytest.raises(UserError, match=r"decode\.quantise"):
        generate(load_model(str(tiny_target)), None, "tea", quantize_target="int8")


@pytest.mark.parametrize("precision", LIBRARIES)
def test_a_report_measures_against_the_quantised_target_and_stays_out_of_the_draft(
    tiny_target, tiny_draft, short_suite, tmp_path, precision
):  # fmt: skip
    pytest.importorskip(LIBRARIES[precision])
    from measurements import settings_for

    from eval.measure import measure

    tiny_draft = shutil.copytree(tiny_draft, tmp_path / "draft")
    asked = settings_for(tiny_target, tiny_draft, suite=short_suite, quantize_target=precision, lookup_prompts=0)
    report = measure(asked, tmp_path / precision)
    assert report.verdict.lossless
    assert report.settings["target_revision"].endswith(f"+{precision}")
    assert not (tiny_draft / "report.json").exists()
    plainly = measure(settings_for(tiny_target, tiny_draft, suite=short_suite, lookup_prompts=0), tmp_path / "plain")
    assert report.footprint.target_gib < plainly.footprint.target_gib
