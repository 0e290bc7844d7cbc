"""Loading: references, and mistakes that are explained in one line."""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import make_llama, make_tokenizer

from configs.errors import UserError
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import (
    load_model,
    load_tokenizer,
    named_dtype,
    tokenizer_fingerprint,
)  # fmt: skip
from decode.pairing import check_pair
from decode.reference import Reference, parse_reference


def test_a_hub_id_may_carry_a_revision():
    assert parse_reference("org/model@abc123") == Reference("org/model", "abc123")
    assert parse_reference("org/model") == Reference("org/model")
    assert parse_reference("gpt2") == Reference("gpt2")


@pytest.mark.parametrize("text", ["./nowhere", "a/b/c", "/nowhere/at/all", "two words", "models/"])
def test_text_that_is_no_model_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such model folder"):
        parse_reference(text)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"not a model folder \(no config\.json"):
        load_model(str(tmp_path))


def test_a_folder_with_a_broken_config_or_without_weights_is_refused_in_one_line(tmp_path, tiny_target):
    for name, content in (("broken", "{"), ("typeless", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        with pytest.raises(UserError) as caught:
            load_model(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    shutil.copytree(tiny_target, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(tmp_path / "weightless"))
    (tmp_path / "weightless" / "model.safetensors").write_bytes((tiny_target / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(tmp_path / "weightless"))


def test_a_repository_that_cannot_be_reached_is_one_line(monkeypatch):
    with pytest.raises(UserError, match="someone/nothing") as caught:
        load_model("someone/nothing@main")
    assert "\n" not in str(caught.value)


def test_a_cut_off_gguf_file_is_named_as_such(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match="not a whole GGUF file"):
        load_model(str(path))
    with pytest.raises(UserError, match="no such GGUF file"):
        load_model(str(tmp_path / "other.gguf"))


def test_dtypes_have_long_and_short_names():
    assert named_dtype("bf16") is named_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(UserError, match="dtype 'int3'"):
        named_dtype("int3")


def test_a_loaded_model_is_frozen_in_evaluation_mode_and_knows_its_end_tokens(tiny_target):
    loaded = load_model(str(tiny_target), dtype="bf16")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.stored_dtype == torch.float32
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.eos_ids, loaded.context_tokens) == ((2,), 256)


def test_the_revision_of_a_local_folder_changes_with_its_weights(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "copy")
    first = load_model(str(tmp_path / "copy")).revision
    assert first == load_model(str(tiny_target)).revision
    changed = load_model(str(tiny_target)).model
    changed.model.norm.weight.data += 1
    changed.save_pretrained(tmp_path / "copy")
    assert load_model(str(tmp_path / "copy")).revision != first


def test_a_draft_with_another_tokenizer_is_refused_with_the_first_difference(tiny_target, tmp_path):
    other = make_tokenizer("zebras zigzag through the zoo of zinc, zebras zigzag")
    make_llama(len(other), layers=1, seed=0).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    target, draft = load_model(str(tiny_target)), load_model(str(tmp_path))
    assert tokenizer_fingerprint(target.tokenizer) != tokenizer_fingerprint(draft.tokenizer)
    with pytest.raises(UserError, match=r"different tokenizers.*first difference: id"):
        check_pair(target, draft)


def test_a_draft_whose_rows_do_not_hold_every_token_is_refused_with_all_three_sizes(tiny_target, tokenizer, tmp_path):
    make_llama(len(tokenizer) - 8, layers=1, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{len(tokenizer) - 8} vocabulary rows.*{len(tokenizer)} entries"):
        check_pair(load_model(str(tiny_target)), load_model(str(tmp_path)))


@pytest.mark.parametrize(("target_padding", "draft_padding"), [(8, 0), (0, 8), (16, 8)])
def test_padded_vocabularies_of_other_sizes_work_and_padding_ids_are_never_drafted(
    tokenizer, tmp_path, target_padding, draft_padding
):
    real = len(tokenizer)
    for name, padding, seed in (("target", target_padding, 0), ("draft", draft_padding, 1)):
        make_llama(real + padding, layers=1, seed=seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    target, drafted = (load_model(str(tmp_path / name)) for name in ("target", "draft"))
    draft = LMDraft.of_pair(target, drafted)
    assert target.vocabulary == (real if target_padding else None)
    for law in (Law(0.0, vocabulary=real), Law(1.5, vocabulary=real)):
        answer = generate_ids(target.model, draft, [5, 9], Settings(law, max_new_tokens=40, num_draft_tokens=3))
        assert all(token < real for r in answer.rounds for token in r.drafted)
        assert all(token < real for token in answer.token_ids)
    greedy = Settings(Law(0.0, vocabulary=real), max_new_tokens=40)
    plain = generate_ids(target.model, None, [5, 9], greedy).token_ids
    assert generate_ids(target.model, draft, [5, 9], greedy).token_ids == plain


def test_a_draft_that_ends_at_another_token_is_taken_with_a_warning(tiny_target, tmp_path):
    shutil.copytree(tiny_target, tmp_path / "draft")
    model = load_model(str(tiny_target)).model
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "draft")
    with pytest.warns(UserWarning, match="the target's rule counts"):
        check_pair(load_model(str(tiny_target)), load_model(str(tmp_path / "draft")))


def test_another_template_than_the_draft_was_trained_with_is_warned_about(tiny_target, tiny_draft):
    target, draft = load_model(str(tiny_target)), load_model(str(tiny_draft))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LMDraft.of_pair(target, draft)
    with pytest.warns(UserWarning, match="was trained with chat template"):
        LMDraft.of_pair(replace(target, template_arguments={"enable_thinking": False}), draft)


def test_a_tokenizer_loads_alone(tiny_target, tokenizer):
    assert load_tokenizer(str(tiny_target)).get_vocab() == tokenizer.get_vocab()
