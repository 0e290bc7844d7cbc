"""Encoder–decoder drafts leave as what transformers loads, and adapters of such models are merged."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM

from configs.errors import UserError
from decode.models import load_model
from distill.build import save_draft
from distill.build_encoder_decoder import cut_encoder_decoder
from train.publish.card import card
from train.publish.doctor import examine
from train.publish.export import export
from train.publish.merge import merge

TEXT = torch.tensor([[20, 21, 22, 1, 30, 31, 32, 33]])


@pytest.fixture(scope="module")
def draft(tiny_t5, tmp_path_factory):
    target = load_model(str(tiny_t5))
    folder = tmp_path_factory.mktemp("drafts") / "t5"
    save_draft(cut_encoder_decoder(target.model, (0, 2), ()), target, "lm", {}, folder)
    return folder


def test_a_head_of_its_own_stays_one(tiny_t5, tmp_path):
    """FLAN-T5's: config.json says that it is the embeddings, and the weights say that it is not."""
    target = load_model(str(tiny_t5))
    head = torch.randn_like(target.model.model.lm_head.weight)
    target.model.model.lm_head.weight = torch.nn.Parameter(head)
    save_draft(cut_encoder_decoder(target.model, (0, 1, 2), ()), target, "lm", {}, tmp_path / "draft")
    read = load_model(str(tmp_path / "draft"))
    torch.testing.assert_close(
        read.model(input_ids=TEXT).logits, target.model(input_ids=TEXT).logits, atol=1e-3, rtol=1e-4
    )


def test_it_is_exported_to_transformers_alone_with_the_code_that_drafts(draft, tiny_t5, tmp_path):
    found = export(str(draft), tmp_path / "out", "transformers", str(tiny_t5))
    assert found.command.count("AutoModelForSeq2SeqLM") == 3
    assert "CausalLM" not in found.command
    said = found.command.replace("print(tokenizer.decode(output[0], skip_special_tokens=True))", "")
    ran: dict = {}
    exec(said, ran)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5).generate(**ran["inputs"], max_new_tokens=64)
    assert torch.equal(ran["output"], plain)
    for engine in ("vllm", "sglang"):
        with pytest.raises(UserError, match=f"{engine} serves no encoder–decoder"):
            export(str(draft), tmp_path / engine, engine, str(tiny_t5))


def test_an_encoder_with_fewer_layers_than_the_decoder_is_refused_and_found(tiny_t5, tmp_path):
    """transformers' own generate fails on it; ours does not."""
    target = load_model(str(tiny_t5))
    save_draft(cut_encoder_decoder(target.model, (0, 1), (0,)), target, "lm", {}, tmp_path / "draft")
    with pytest.raises(IndexError):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "draft").generate(TEXT[:, :4], max_new_tokens=4)
    with pytest.raises(UserError, match=r"decoder has 2 layers and its encoder 1.*encoder_layers"):
        export(str(tmp_path / "draft"), tmp_path / "out", "transformers", str(tiny_t5))
    (fault,) = examine(str(tmp_path / "draft"), str(tiny_t5))
    assert "the encoder has 1 layers" in fault.what


def test_the_doctor_finds_nothing_in_a_healthy_folder_and_its_export(draft, tiny_t5, tmp_path):
    assert examine(str(draft), str(tiny_t5)) == []
    export(str(draft), tmp_path / "out", "transformers", str(tiny_t5))
    assert examine(str(tmp_path / "out"), str(tiny_t5), trained=str(draft)) == []


def test_its_card_says_how_transformers_drafts_with_it_and_names_no_engine(draft):
    text = str(card(draft, repo_id="somebody/draft"))
    assert "AutoModelForSeq2SeqLM" in text
    assert "vllm serve" not in text
    assert "sglang" not in text.lower()


def test_an_adapter_of_such_a_model_is_merged_into_it(tiny_t5, tmp_path):
    torch.manual_seed(0)
    base = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tiny_t5)
    found = load_model(str(tmp_path), "float32").model(input_ids=TEXT).logits[:, 3:]
    adapted.eval()
    expected = adapted(input_ids=TEXT[:, :4], decoder_input_ids=torch.tensor([[0, 30, 31, 32, 33]])).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    merge(str(tmp_path), tmp_path / "whole")
    merged = load_model(str(tmp_path / "whole"), "float32").model(input_ids=TEXT).logits[:, 3:]
    torch.testing.assert_close(merged, found, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(found, load_model(str(tiny_t5)).model(input_ids=TEXT).logits[:, 3:], atol=1e-2)
