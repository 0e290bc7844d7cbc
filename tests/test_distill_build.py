"""A draft built from its target, and its folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import UserError
from decode.models import load_model
from distill.build import build_lm_draft, save_draft, scratch_lm_draft
from distill.shape import DraftSettings


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


def test_all_layers_make_the_target_again(target):
    draft = build_lm_draft(target.model, (0, 1, 2))
    ids = torch.tensor([[5, 9, 30, 7]])
    torch.testing.assert_close(draft(ids).logits, target.model(ids).logits)


def test_the_chosen_layers_are_copied_in_their_order(target):
    draft = build_lm_draft(target.model, (-1, 0))
    assert draft.config.num_hidden_layers == 2
    for new, old in enumerate((2, 0)):
        ours, theirs = draft.model.layers[new].state_dict(), target.model.model.layers[old].state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert draft.model.embed_tokens.weight.data_ptr() != target.model.model.embed_tokens.weight.data_ptr()
    assert all(p.requires_grad for p in draft.parameters())


@pytest.mark.parametrize("layers", [(0, 3), (-4,), (0, 0), (2, -1)])
def test_layers_that_do_not_exist_or_come_twice_are_refused(target, layers):
    with pytest.raises(UserError, match=r"draft\.layers"):
        build_lm_draft(target.model, layers)


def test_the_folder_is_a_plain_transformers_model_that_says_whose_draft_it_is(target, tiny_draft):
    config = json.loads((tiny_draft / "config.json").read_text())
    assert config["draftsmith"]["target_revision"] == target.revision
    assert config["draftsmith"]["kind"] == "lm"
    assert "quantization_config" not in config
    assert {path.name for path in tiny_draft.iterdir()} >= {"model.safetensors", "tokenizer.json", "training.json"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_draft), AutoTokenizer.from_pretrained(tiny_draft)
    ids = torch.tensor([[5, 9, 30, 7]])
    torch.testing.assert_close(model(ids).logits, build_lm_draft(target.model, (0, 1))(ids).logits)
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert tokenizer.chat_template == target.tokenizer.chat_template


def test_transformers_assisted_generation_takes_the_folder_untouched(target, tiny_draft):
    ids = torch.tensor([[5, 9, 30, 7]])
    assistant = AutoModelForCausalLM.from_pretrained(tiny_draft)
    how = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.model.generate(ids, assistant_model=assistant, **how), target.model.generate(ids, **how))


def test_weights_are_stored_in_the_dtype_of_the_target(target, tiny_target, tmp_path):
    folder = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_target).bfloat16().save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    half = load_model(str(folder), dtype="float32")
    save_draft(build_lm_draft(half.model, (0,)), half, "lm", {}, tmp_path / "draft")
    assert load_model(str(tmp_path / "draft")).model.dtype == torch.bfloat16


def test_a_failed_save_leaves_the_earlier_draft(target, tmp_path):
    folder = tmp_path / "draft"
    save_draft(build_lm_draft(target.model, (0,)), target, "lm", {"step": 1}, folder)
    with pytest.raises(TypeError):
        save_draft(build_lm_draft(target.model, (1,)), target, "lm", {"step": object()}, folder)
    assert json.loads(Path(folder / "training.json").read_text()) == {"step": 1}


def test_a_draft_from_scratch_has_the_asked_for_depth_and_width_and_the_targets_head_size(target):
    draft = scratch_lm_draft(target.model, depth=2, width=16, seed=1)
    assert draft.model.embed_tokens.weight.shape == (len(target.tokenizer), 16)
    assert len(draft.model.layers) == 2
    assert draft.config.head_dim == target.model.config.hidden_size // target.model.config.num_attention_heads
    assert draft(torch.tensor([[5, 9]])).logits.shape == (1, 2, len(target.tokenizer))
    again, other = (scratch_lm_draft(target.model, 2, 16, seed) for seed in (1, 2))
    assert torch.equal(draft.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(draft.lm_head.weight, other.lm_head.weight)
    with pytest.raises(UserError, match="multiple of 8, the size of the target's heads"):
        scratch_lm_draft(target.model, 2, 20, seed=1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"depth": 3}, "depth has no effect on a draft of kind lm that starts from target"),
        ({"init": "scratch", "layers": (1,)}, "layers has no effect on a draft of kind lm that starts from scratch"),
        ({"init": "org/model", "width": 64}, "width has no effect on a draft of kind lm that starts from org/model"),
        (
            {"kind": "eagle3", "init": "scratch"},
            "draft.init=scratch is of kind lm; a feature draft starts from its target or from a draft",
        ),
    ],
)
def test_shapes_without_effect_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        DraftSettings(**settings)
