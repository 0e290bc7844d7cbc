"""An exported draft is the trained one, in the form that the engine reads; what an engine would misread is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CASES, make_llama
from jobs import ROOT, environment
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import UserError
from decode import generate
from decode.drafts.feature_config import TAPS
from decode.drafts.head import trim_head
from decode.drafts.kinds import load_draft
from decode.models import load_model
from distill.build import build_eagle3_draft, build_lm_draft, save_draft
from train.publish.doctor import examine
from train.publish.engine_forms import read_feature_config, tensor_shapes
from train.publish.export import export, whole_vocabulary
from train.publish.serve import serve_command

WORDS = torch.arange(3, 40).unsqueeze(0)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def kept(tokenizer) -> torch.Tensor:
    return torch.cat([torch.arange(0, 3), torch.arange(5, len(tokenizer), 2)])


@pytest.fixture(scope="module")
def feature_draft(tiny_target, kept, tmp_path_factory) -> Path:
    target = load_model(str(tiny_target), "float32")
    folder = tmp_path_factory.mktemp("drafts") / "feature"
    save_draft(build_eagle3_draft(target.model, (0, 1, 3), kept, 0), target, "eagle3", {}, folder)
    return folder


@pytest.fixture(scope="module")
def trimmed_draft(tiny_target, kept, tmp_path_factory) -> Path:
    target = load_model(str(tiny_target), "float32")
    draft = build_lm_draft(target.model, (0, 1))
    trim_head(draft, kept)
    folder = tmp_path_factory.mktemp("drafts") / "trimmed"
    save_draft(draft, target, "lm", {}, folder)
    return folder


def test_a_plain_draft_is_a_plain_folder_that_assists_generation(tiny_target, tiny_draft, tmp_path):
    done = export(str(tiny_draft), tmp_path / "out", "transformers", str(tiny_target))
    draft = AutoModelForCausalLM.from_pretrained(done.folder)
    assert torch.equal(draft(WORDS).logits, AutoModelForCausalLM.from_pretrained(tiny_draft)(WORDS).logits)
    assert draft.generation_config.num_assistant_tokens_schedule == "constant"
    target, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_target), AutoTokenizer.from_pretrained(done.folder)
    inputs = tokenizer("warm tea", return_tensors="pt")
    settings = {"max_new_tokens": 16, "do_sample": False}
    assisted = target.generate(**inputs, assistant_model=draft, **settings)
    assert torch.equal(assisted, target.generate(**inputs, **settings))
    assert str(done.folder) in done.command
    assert "assistant_model=draft" in done.command


def test_the_printed_python_runs(tiny_target, tiny_draft, tmp_path):
    done = export(str(tiny_draft), tmp_path / "out", "transformers", str(tiny_target))
    run = subprocess.run([sys.executable, "-c", done.command], capture_output=True, text=True, env=environment())
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_a_trimmed_head_becomes_a_whole_one_whose_other_rows_are_zero(
    tiny_target, trimmed_draft, kept, tmp_path, engine
):
    (trimmed_draft / "report.json").write_text("{}")
    done = export(str(trimmed_draft), tmp_path / "out", engine, str(tiny_target))
    whole = AutoModelForCausalLM.from_pretrained(done.folder)
    ours = load_model(str(trimmed_draft), "float32").model
    logits = whole(WORDS).logits
    assert torch.equal(logits[..., kept], ours(WORDS).logits)
    other = torch.ones(logits.shape[-1], dtype=torch.bool)
    other[kept] = False
    assert not logits[..., other].any()
    config = config_of(done.folder)
    assert "draft_vocab_size" not in config
    assert not config["tie_word_embeddings"]
    assert config["draftsmith"]["vocabulary_map_hash"] is None
    share = config["draftsmith"]["export"]["empty_rows_share"]
    assert 0 < share < 1
    assert any("measure this folder" in note for note in done.notes)
    assert not (done.folder / "report.json").exists(), "it measured the trimmed head"
    assert any(f"{share:.2%}" in note for note in done.notes)


def test_the_share_of_empty_rows_is_their_mean_probability(tiny_target, trimmed_draft, kept, tmp_path):
    from decode.chat import render_prompt
    from eval.suites import read_suite

    done = export(str(trimmed_draft), tmp_path / "out", "vllm", str(tiny_target))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(done.folder), AutoTokenizer.from_pretrained(done.folder)
    seen, places = 0.0, 0
    asked = {}
    for prompt in read_suite("suite"):
        asked.setdefault(prompt.category, prompt)
    for prompt in asked.values():
        with torch.no_grad():
            probabilities = model(torch.tensor([render_prompt(tokenizer, prompt.messages)])).logits[0].softmax(-1)
        seen += float((1 - probabilities[:, kept].sum(-1)).sum())
        places += len(probabilities)
    assert config_of(done.folder)["draftsmith"]["export"]["empty_rows_share"] == pytest.approx(seen / places, rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [40, 25])
def test_rows_of_the_vocabulary_are_added_as_zeros_and_taken_away(tied, rows):
    model = make_llama(32, layers=1, seed=0)
    if not tied:
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(torch.nn.Linear(32, 32, bias=False))
    ids = torch.arange(3, 20).unsqueeze(0)
    before = model(ids).logits
    whole_vocabulary(model, rows)
    after = model(ids).logits
    assert after.shape[-1] == rows == model.config.vocab_size
    assert torch.equal(after[..., : min(rows, 32)], before[..., : min(rows, 32)])
    assert not after[..., 32:].any()


def test_a_draft_of_fewer_rows_is_padded_to_the_targets_and_still_decodes(tiny_target, tiny_draft, tokenizer, tmp_path):
    padded = tmp_path / "target"
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    model.resize_token_embeddings(len(tokenizer) + 24)
    model.save_pretrained(padded)
    tokenizer.save_pretrained(padded)
    done = export(str(tiny_draft), tmp_path / "out", "vllm", str(padded))
    assert config_of(done.folder)["vocab_size"] == len(tokenizer) + 24
    assert any("24 of" in note for note in done.notes)
    target = load_model(str(padded), "float32")
    settings = {"max_new_tokens": 24, "temperature": 0}
    answer = generate(target, load_draft(target, str(done.folder), "float32"), "warm tea", **settings)
    assert answer.token_ids == generate(target, None, "warm tea", **settings).token_ids


def test_vllms_form_has_the_fields_its_reader_takes(tiny_target, feature_draft, kept, tmp_path):
    done = export(str(feature_draft), tmp_path / "out", "vllm", str(tiny_target))
    config, target = config_of(done.folder), config_of(tiny_target)
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert not Path(config["speculators_config"]["verifier"]["name_or_path"]).is_absolute()
    assert config["norm_before_residual"] is False
    assert config["draft_vocab_size"] == len(kept)
    assert config[TAPS] == [0, 1, 3]
    assert config["eagle_config"][TAPS] == [-1, 0, 2]
    assert layer["num_aux_hidden_states"] == 3
    for key in ("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_size", "num_key_value_heads"):
        assert layer[key] == target[key], key
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == config["rope_theta"]
    tensors = load_file(done.folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(read_feature_config(config))
    assert torch.equal(tensors["d2t"] + torch.arange(len(kept)), kept)
    assert tensors["t2d"].nonzero().flatten().tolist() == kept.tolist()
    assert done.command.startswith("vllm serve ")
    assert '"num_speculative_tokens": 3' in done.command


def test_sglangs_form_is_flat_and_counts_layers_from_one_later(tiny_target, feature_draft, tmp_path):
    done = export(str(feature_draft), tmp_path / "out", "sglang", str(tiny_target))
    config = config_of(done.folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "speculators_config" not in config
    assert config["eagle_config"][TAPS] == [tap - 1 for tap in config[TAPS]]
    assert "--speculative-num-steps 3" in done.command
    assert "--speculative-num-draft-tokens 4" in done.command


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_exported_feature_draft_still_decodes_here_as_it_did(tiny_target, feature_draft, tmp_path, engine):
    done = export(str(feature_draft), tmp_path / "out", engine, str(tiny_target))
    target = load_model(str(tiny_target), "float32")
    found = []
    for folder in (feature_draft, done.folder):
        draft = load_draft(target, str(folder), "float32")
        answer = generate(target, draft, "warm tea", max_new_tokens=24, temperature=0)
        found.append([(r.drafted, r.accepted) for r in answer.rounds])
    assert found[0] == found[1]


def test_e02_a_head_over_the_whole_vocabulary_has_no_map(tiny_target, tmp_path):
    target = load_model(str(tiny_target), "float32")
    save_draft(build_eagle3_draft(target.model, (1, 2, 3), None, 0), target, "eagle3", {}, tmp_path / "draft")
    done = export(str(tmp_path / "draft"), tmp_path / "out", "vllm", str(tiny_target))
    assert not {"d2t", "t2d"} & load_file(done.folder / "model.safetensors").keys()


def test_e02_a_broken_map_is_refused_on_export(tiny_target, feature_draft, tmp_path):
    for n, damage in enumerate((lambda t: t["d2t"].zero_(), lambda t: t.pop("t2d"), lambda t: t["t2d"].roll(1))):
        folder = Path(shutil.copytree(feature_draft, tmp_path / f"draft{n}"))
        tensors = load_file(folder / "model.safetensors")
        changed = damage(tensors)
        if n == 2:
            tensors["t2d"] = changed
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError):
            export(str(folder), tmp_path / f"out{n}", "vllm", str(tiny_target))
        assert not (tmp_path / f"out{n}").exists()


def test_e06_the_names_of_the_case_are_those_of_the_architecture_that_config_names(tiny_draft, tiny_target, tmp_path):
    names = json.loads((CASES / "E06/scenario.json").read_text())["names"]
    done = export(str(tiny_draft), tmp_path / "out", "vllm", str(tiny_target))
    held = load_file(done.folder / "model.safetensors").keys()
    tied = config_of(done.folder)["tie_word_embeddings"]
    assert {name for name in names if not (tied and name == "lm_head.weight")} <= held
    assert config_of(done.folder)["architectures"] == ["LlamaForCausalLM"]


def written_by_another_tool(folder: Path, place: Path, how: str) -> Path:
    """The same draft as SGLang's, speculators' or the first EAGLE-3 tools write it."""
    copy = Path(shutil.copytree(folder, place / how.replace(" ", "-")))
    config, tensors = config_of(copy), load_file(copy / "model.safetensors")
    if how == "sglang":
        for key in (TAPS, "target_hidden_size", "num_aux_hidden_states", "draftsmith"):
            config.pop(key)
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if how == "speculators":
        layer = {key: value for key, value in config.items() if not key.startswith(("eagle", "draft", "target_h"))}
        config = {
            "speculators_model_type": "eagle3", "transformer_layer_config": layer, "norm_before_residual": False,
            TAPS: config[TAPS], "draft_vocab_size": config["draft_vocab_size"],
        }  # fmt: skip
    (copy / "config.json").write_text(json.dumps(config))
    if how != "shards":
        save_file(
            {k: t.contiguous() for k, t in tensors.items()}, copy / "model.safetensors", metadata={"format": "pt"}
        )
        return copy
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, copy / file, metadata={"format": "pt"})
    shard_of = {name: file for file, some in halves.items() for name in some}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return copy


@pytest.mark.parametrize("how", ["sglang", "speculators", "shards"])
def test_a_draft_of_another_tool_decodes_and_exports_as_ours_does(feature_draft, tiny_target, tmp_path, how):
    theirs = written_by_another_tool(feature_draft, tmp_path, how)
    done = export(str(theirs), tmp_path / "out", "vllm", str(tiny_target))
    target, found = load_model(str(tiny_target), "float32"), []
    for folder in (feature_draft, theirs, done.folder):
        draft = load_draft(target, str(folder), "float32")
        answer = generate(target, draft, "warm tea", max_new_tokens=24, temperature=0)
        found.append([(r.drafted, r.accepted) for r in answer.rounds])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "change", [{"norm_before_residual": True}, {"fc_norm": True}, {"attention_bias": True}, {"num_hidden_layers": 2},
               {TAPS: None, "eagle_config": None}],
)  # fmt: skip
def test_a_draft_that_is_computed_in_another_way_is_refused(feature_draft, tiny_target, tmp_path, change):
    folder = Path(shutil.copytree(feature_draft, tmp_path / "draft"))
    (folder / "config.json").write_text(json.dumps(config_of(folder) | change))
    with pytest.raises(UserError, match=r"another computation|does not name the target's layers"):
        export(str(folder), tmp_path / "out", "vllm", str(tiny_target))
    with pytest.raises(UserError, match=r"another computation|does not name the target's layers"):
        load_draft(load_model(str(tiny_target), "float32"), str(folder))


def test_another_tokenizer_of_the_same_size_is_refused_and_a_missing_one_taken_from_the_target(
    feature_draft, tiny_target, tmp_path
):
    folder = Path(shutil.copytree(feature_draft, tmp_path / "draft"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    a, b = sorted(words, key=words.get)[200:202]
    words[a], words[b] = words[b], words[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="different tokenizers"):
        export(str(folder), tmp_path / "out", "vllm", str(tiny_target))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink(missing_ok=True)
    done = export(str(folder), tmp_path / "out", "vllm", str(tiny_target))
    assert AutoTokenizer.from_pretrained(done.folder).chat_template


def test_a_revision_of_the_target_is_pinned_in_the_words_of_each_engine():
    assert "vllm serve org/t --revision abc " in serve_command("vllm", "lm", "org/t@abc", "d", 2)
    assert "--model-path org/t --revision abc " in serve_command("sglang", "eagle3", "org/t@abc", "d", 2)
    assert 'from_pretrained("org/t", revision="abc")' in serve_command("transformers", "lm", "org/t@abc", "d", 2)


def test_a_feature_draft_is_refused_for_transformers(feature_draft, tiny_target, tmp_path):
    with pytest.raises(UserError, match=r"draftsmith decode.*vllm or sglang"):
        export(str(feature_draft), tmp_path / "out", "transformers", str(tiny_target))


def test_another_target_or_a_folder_that_is_there_is_refused(
    feature_draft, tiny_draft, tiny_target, tokenizer, tmp_path
):
    make_llama(len(tokenizer) + 8, layers=3, seed=1).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"320 ids; .* has 32 and 328: use a draft made for this target"):
        export(str(feature_draft), tmp_path / "out", "vllm", str(tmp_path / "other"))
    with pytest.raises(UserError, match="exists already"):
        export(str(feature_draft), tmp_path / "other", "vllm", str(tiny_target))
    short = make_llama(300, layers=1, seed=1)
    short.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    with pytest.raises(UserError, match="real tokens are missing"):
        export(str(tiny_draft), tmp_path / "out", "vllm", str(tmp_path / "short"))


def test_without_its_target_at_hand_it_says_so_and_goes_on(feature_draft, tmp_path):
    done = export(str(feature_draft), tmp_path / "out", "vllm")
    assert any("--target" in note for note in done.notes)


def test_the_length_that_the_report_recommends_is_the_one_served(feature_draft, tiny_target, tmp_path):
    folder = Path(shutil.copytree(feature_draft, tmp_path / "draft"))
    config = config_of(folder)
    config["draftsmith"]["recommended_num_draft_tokens"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    done = export(str(folder), tmp_path / "out", "vllm", str(tiny_target))
    assert '"num_speculative_tokens": 5' in done.command
    assert config_of(done.folder)["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert not any("was not measured" in note for note in done.notes)


@pytest.mark.parametrize("how", ["tied", "untied"])
def test_e04_a_head_tied_or_drifted_gives_the_same_logits_after_export(tiny_target, tiny_draft, tmp_path, how):
    target = load_model(str(tiny_target), "float32")
    draft = build_lm_draft(target.model, (0, 1))
    if how == "untied":
        draft.config.tie_word_embeddings = False
        head = torch.nn.Linear(32, draft.config.vocab_size, bias=False)
        head.weight = torch.nn.Parameter(draft.get_input_embeddings().weight.detach() + 0.1)
        draft.set_output_embeddings(head)
    save_draft(draft, target, "lm", {}, tmp_path / "draft")
    done = export(str(tmp_path / "draft"), tmp_path / "out", "vllm", str(tiny_target))
    again = AutoModelForCausalLM.from_pretrained(done.folder)
    assert torch.allclose(again(WORDS).logits, draft(WORDS).logits, atol=1e-5)
    assert config_of(done.folder)["tie_word_embeddings"] == (how == "tied")
    assert ("lm_head.weight" in load_file(done.folder / "model.safetensors")) == (how == "untied")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_e04_a_draft_trained_by_lora_is_exported_whole(tiny_target, tiny_draft, tmp_path, stored):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, dtype = Path(shutil.copytree(tiny_draft, tmp_path / "base")), getattr(torch, stored)
    AutoModelForCausalLM.from_pretrained(base).to(dtype).save_pretrained(base)
    whole = load_model(str(base), "float32")
    wrapped = get_peft_model(whole.model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = wrapped(WORDS).logits
    done = export(str(tmp_path / "adapter"), tmp_path / "out", "vllm", str(tiny_target))
    logits = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)(WORDS).logits
    assert torch.allclose(logits, expected, atol=1e-5 if stored == "float32" else 0.3)
    assert AutoModelForCausalLM.from_pretrained(done.folder).dtype == dtype
    assert examine(str(done.folder), str(tiny_target), str(tmp_path / "adapter")) == []
    assert not any(path.name.startswith("adapter") for path in done.folder.iterdir())


def test_the_verb_prints_the_command_alone_on_stdout(tiny_target, feature_draft, tmp_path):
    command = [sys.executable, "-c", "from distill.cli import main; main()", "export", str(feature_draft)]
    command += [str(tmp_path / "out"), "--to", "sglang", "--target", str(tiny_target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python -m sglang.launch_server")
    assert len(done.stdout.splitlines()) == 1
