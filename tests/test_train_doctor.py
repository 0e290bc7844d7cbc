"""The doctor finds each planted fault, and nothing in a healthy folder."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import make_llama, make_tokenizer
from jobs import ROOT, environment
from safetensors.torch import load_file, save_file

from configs.errors import UserError
from decode.drafts.feature_config import TAPS
from decode.drafts.head import trim_head
from decode.models import load_model
from distill.build import build_eagle3_draft, build_lm_draft, save_draft
from train.publish.doctor import examine
from train.publish.export import export

Change = Callable[[dict], object]


@pytest.fixture(scope="module")
def folders(tiny_target, tiny_draft, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Healthy folders of each kind and form."""
    root = tmp_path_factory.mktemp("healthy")
    target = load_model(str(tiny_target), "float32")
    kept = torch.arange(1, len(tokenizer), 2)
    save_draft(build_eagle3_draft(target.model, (1, 2, 3), kept, 0), target, "eagle3", {}, root / "eagle3")
    save_draft(build_eagle3_draft(target.model, (1, 2, 3), None, 0), target, "eagle3", {}, root / "eagle3 whole")
    save_draft(build_eagle3_draft(target.model, (1, 3), kept, 0), target, "eagle3", {}, root / "eagle3 two taps")
    draft = build_lm_draft(target.model, (0, 1))
    trim_head(draft, kept)
    save_draft(draft, target, "lm", {}, root / "lm trimmed")
    found = {path.name: path for path in root.iterdir()} | {"lm": tiny_draft, "target": tiny_target}
    for name, engine in (("eagle3", "vllm"), ("eagle3", "sglang"), ("eagle3 whole", "vllm"), ("lm", "vllm"),
                         ("lm trimmed", "vllm"), ("eagle3 two taps", "vllm")):  # fmt: skip
        key = f"{name} for {engine}"
        found[key] = export(str(found[name]), root / key.replace(" ", "-"), engine, str(tiny_target)).folder
    return found


HEALTHY = ["lm", "eagle3", "eagle3 whole", "eagle3 two taps", "eagle3 for vllm", "eagle3 for sglang", "lm for vllm",
           "eagle3 whole for vllm", "lm trimmed for vllm", "eagle3 two taps for vllm"]  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_folder_has_no_finding(folders, name, tiny_target):
    assert examine(str(folders[name])) == []
    assert examine(str(folders[name]), str(tiny_target)) == []
    if " for " in name:
        assert examine(str(folders[name]), str(tiny_target), str(folders[name.split(" for ")[0]])) == []


def test_a_trimmed_plain_draft_gets_a_note_and_no_fault(folders):
    (finding,) = examine(str(folders["lm trimmed"]))
    assert not finding.is_fault
    assert "draftsmith export" in finding.line()


def planted(folder: Path, place: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    """A copy of a folder with its config or tensors changed."""
    copy = Path(shutil.copytree(folder, place / "copy"))
    if config:
        content = json.loads((copy / "config.json").read_text())
        config(content)
        (copy / "config.json").write_text(json.dumps(content))
    if tensors:
        weights = load_file(copy / "model.safetensors")
        tensors(weights)
        save_file(
            {k: t.contiguous() for k, t in weights.items()}, copy / "model.safetensors", metadata={"format": "pt"}
        )
    return copy


def faults(folder: Path, *more: str, engine: str | None = None) -> list[str]:
    return [finding.line() for finding in examine(str(folder), *more, engine=engine) if finding.is_fault]


def renamed(old: str, new: str) -> Change:
    def change(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name[len(old) :]] = tensors.pop(name)

    return change


def absolute(tensors: dict) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def broken(tensors: dict) -> None:
    tensors["fc.weight"][0, 0] = torch.nan


IN_CONFIG = [
    ("eagle3", lambda c: c.update(architectures=["Eagle3Speculator"]), "know such a draft as"),
    ("eagle3", lambda c: c.update(architectures=["LlamaForCausalLM"]), "No engine knows it as one"),
    ("eagle3", lambda c: c.pop("hidden_size"), "No engine knows it|does not give hidden_size"),
    ("eagle3 for vllm", lambda c: c["transformer_layer_config"].pop("intermediate_size"),
     "not give intermediate_size"),
    ("eagle3 for vllm", lambda c: c.pop("norm_before_residual"), "norm_before_residual is not written"),
    ("eagle3 for vllm", lambda c: c.update(norm_before_residual=True), "norm_before_residual is true"),
    ("eagle3", lambda c: c.update(norm_before_residual=True), "norm_before_residual is true"),
    ("eagle3", lambda c: c.pop("max_position_embeddings"), "max_position_embeddings is not written"),
    ("eagle3", lambda c: c.pop("rms_norm_eps"), "rms_norm_eps is not written"),
    ("eagle3", lambda c: c.update(draft_vocab_size=5000), "draft_vocab_size is 5000"),
    ("eagle3", lambda c: c.update(norm_before_fc=True), "missing tensors: input_norm.weight"),
    ("eagle3 for vllm", lambda c: c["speculators_config"].pop("proposal_methods"), "speculative_tokens"),
    ("eagle3 for vllm", lambda c: c["speculators_config"].pop("verifier"), "name_or_path is not given"),
    ("eagle3 for vllm", lambda c: c["speculators_config"]["verifier"].update(name_or_path="/srv/t"), "local path t"),
    ("eagle3 for vllm", lambda c: c["transformer_layer_config"].pop("model_type"), "no model_type"),
    ("eagle3 for vllm", lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_theta=5e5), "RoPE"),
    ("eagle3 for vllm", lambda c: c.update(rms_norm_eps=1e-3), "differ (rms_norm_eps)"),
    ("eagle3 two taps for vllm", lambda c: c["transformer_layer_config"].pop("num_aux_hidden_states"), "2 tapped"),
    ("eagle3", lambda c: c.pop("eagle_config"), "eagle_config has no"),
    ("eagle3", lambda c: c["eagle_config"].update({TAPS: c[TAPS]}), "SGLang counts from one layer later"),
    ("eagle3", lambda c: c.pop("draft_vocab_size"), "draft_vocab_size is not written"),
    ("eagle3", lambda c: c.update(draft_vocab_size=64), "lm_head.weight is"),
    ("eagle3", lambda c: (c.pop("rope_parameters"), c.pop("rope_theta", None)), "no RoPE base"),
    ("eagle3", lambda c: c.update(rope_theta=5e5), "RoPE base is written twice"),
    ("lm", lambda c: c.update(rope_theta=5e5), "RoPE base is written twice"),
    ("eagle3", lambda c: c.update(attention_bias=True), "attention_bias"),
    ("eagle3", lambda c: c.update(num_hidden_layers=2), "2 layers"),
    ("eagle3", lambda c: c["draftsmith"].update(vocabulary_map_hash="0" * 16), "not the one that config.json names"),
    ("lm", lambda c: c.update(architectures=["LlamaModel"]), "architectures is"),
    ("lm", lambda c: c.update(model_type="no_such_model"), "transformers makes no language model"),
    ("lm", lambda c: c.update(hidden_size=16), "and config.json makes it"),
    ("lm", lambda c: c.update(num_hidden_layers=3), "missing tensors"),
    ("lm", lambda c: c.update(tie_word_embeddings=False), "missing tensors: lm_head.weight"),
    ("lm", lambda c: c.update(auto_map={"AutoModel": "m.M"}), "auto_map"),
    ("lm", lambda c: c.update(quantization_config={"quant_method": "gguf"}), "quantization_config"),
    ("lm", lambda c: c.update(dtype="bfloat16"), "says bfloat16, the weights are F32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), IN_CONFIG)
def test_a_fault_in_config_json_is_found(folders, tmp_path, name, change, words):
    found = faults(planted(folders[name], tmp_path, config=change))
    assert any(part in line for line in found for part in words.split("|")), found


IN_WEIGHTS = [
    ("eagle3", renamed("", "model."), "begin with model."),
    ("eagle3", lambda t: t.pop("fc.weight"), "fc.weight"),
    ("eagle3", lambda t: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(8)}), "nothing reads"),
    ("eagle3", lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}), "lm_head.weight is"),
    ("eagle3", lambda t: t.pop("d2t"), "no d2t beside it"),
    ("eagle3", lambda t: t.pop("t2d"), "no t2d beside d2t"),
    ("eagle3", lambda t: t["d2t"].zero_(), "all zero"),
    ("eagle3", absolute, "the target's ids themselves"),
    ("eagle3", lambda t: t.update({"d2t": -t["d2t"]}), "different ids"),
    ("eagle3", lambda t: t.update({"t2d": t["t2d"].roll(1)}), "do not name the same ids"),
    ("eagle3", lambda t: t.update({"d2t": t["d2t"].float()}), "of int64"),
    ("eagle3", lambda t: t.update({"d2t": t["d2t"].int()}), "of int64"),
    ("eagle3", lambda t: t.update({"t2d": t["t2d"][:-1]}), "t2d is"),
    ("eagle3", lambda t: t.update({"embed_tokens.weight": torch.ones(3, 32)}), "embed_tokens.weight is"),
    ("eagle3 whole", lambda t: t.update({"d2t": torch.zeros(320, dtype=torch.long)}), "beside a head over the whole"),
    ("eagle3", broken, "NaN"),
    ("eagle3", lambda t: t.update({"norm.weight": t["norm.weight"].half()}), "several dtypes"),
    ("lm", lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
    ("lm", lambda t: t.update({"extra.weight": torch.ones(2)}), "nothing reads: extra.weight"),
    ("lm", renamed("model.layers.", "decoder.layers."), "missing tensors"),
    ("lm", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "head and embeddings differ"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), IN_WEIGHTS)
def test_a_fault_in_the_weights_is_found(folders, tmp_path, name, change, words):
    found = faults(planted(folders[name], tmp_path, tensors=change))
    assert any(words in line for line in found), found


def test_what_only_one_engine_stumbles_over_is_a_fault_when_it_is_asked_for(folders, tmp_path):
    copy = planted(folders["eagle3"], tmp_path, config=lambda c: c.pop(TAPS))
    assert faults(copy) == [], "SGLang's own layout"
    assert any("only eagle_config has" in line for line in faults(copy, engine="vllm"))
    assert any("only eagle_config has" in finding.line() for finding in examine(str(copy)))


def with_more(tensors: dict[str, tuple[int, ...]]) -> Change:
    return lambda t: t.update({name: torch.ones(shape) for name, shape in tensors.items()})


OTHERS = [
    ("eagle3 for vllm", lambda c: [part.update(model_type="qwen3") for part in (c, c["transformer_layer_config"])],
     with_more({f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"})),
    ("eagle3 for vllm", lambda c: c.update(norm_before_fc=True), with_more({"input_norm.weight": (96,)})),
    ("eagle3 for vllm", lambda c: c.update(fc_norm=True), with_more({f"fc_norm.{i}.weight": (32,) for i in range(3)})),
    ("eagle3 for vllm", lambda c: (c.update(architectures=["Eagle3DraftModel"]), c.pop("hidden_size")), None),
    ("eagle3 for sglang", lambda c: (c.pop(TAPS), c.pop("num_aux_hidden_states")), None),
    ("eagle3", lambda c: c.update(architectures=["DFlashDraftModel"]), None),
    ("eagle3 for vllm", lambda c: c.update(speculators_model_type="peagle"), None),
    ("eagle3", lambda c: c.update(dtype="float32"), with_more({"layers.0.self_attn.rotary_emb.inv_freq": (4,)})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "tensors"), OTHERS)
def test_a_healthy_draft_of_another_tool_has_no_fault(folders, tmp_path, name, config, tensors):
    copy = planted(folders[name], tmp_path, config=config, tensors=tensors)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / file).unlink(missing_ok=True)  # engines take the target's
    assert faults(copy) == []


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "opt", "qwen2", "gemma2", "mixtral"])
def test_a_healthy_model_of_another_family_has_no_fault(architecture, tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "n_embd": 32, "intermediate_size": 64, "ffn_dim": 64,
        "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
        "word_embed_proj_dim": 32, "head_dim": 8, "num_local_experts": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(architecture)
    for key, value in small.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:2]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="40KB")
    tokenizer.save_pretrained(tmp_path)
    assert faults(tmp_path) == []


ODD = ["x", None, [], [1], 5, {}, -1, 0, 10**400, "x" * 400, True, {"a": {"b": []}}]
ODD_AT = [
    ("eagle3 for vllm", ("transformer_layer_config",)), ("eagle3 for vllm", ("speculators_config",)),
    ("eagle3 for vllm", ("speculators_config", "verifier")),
    ("eagle3 for vllm", ("speculators_config", "verifier", "name_or_path")),
    ("eagle3", ("rope_parameters",)), ("eagle3", ("rope_theta",)), ("eagle3", ("head_dim",)), ("eagle3", (TAPS,)),
    ("eagle3", ("eagle_config",)), ("eagle3", ("num_attention_heads",)), ("eagle3", ("draft_vocab_size",)),
    ("eagle3", ("architectures",)), ("eagle3", ("draftsmith",)), ("eagle3", ("dtype",)),
    ("lm", ("vocab_size",)), ("lm", ("num_hidden_layers",)), ("lm", ("rope_parameters",)), ("lm", ("architectures",)),
    ("lm", ("model_type",)), ("lm trimmed", ("draft_vocab_size",)), ("lm", ("quantization_config",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), ODD_AT)
def test_whatever_stands_in_a_config_ends_in_findings_and_no_traceback(folders, tiny_target, tmp_path, name, keys):
    copy = planted(folders[name], tmp_path)
    healthy = json.loads((copy / "config.json").read_text())
    for value in ODD:
        content = json.loads(json.dumps(healthy))
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (copy / "config.json").write_text(json.dumps(content))
        with suppress(UserError):  # one line as well
            assert all(finding.line() for finding in examine(str(copy), str(tiny_target)))


def test_a_config_that_claims_more_layers_than_there_are_tensors_is_not_built(folders, tmp_path):
    copy = planted(folders["lm"], tmp_path, config=lambda c: c.update(num_hidden_layers=10_000_000))
    assert any("num_hidden_layers is 10000000" in line for line in faults(copy))


def test_the_names_of_the_first_eagle3_drafts_are_fine(folders, tmp_path):
    assert faults(planted(folders["eagle3"], tmp_path, tensors=renamed("layers.0.", "midlayer."))) == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mask_embedding.pt", "state.pkl"])
def test_a_pickled_file_is_a_fault(folders, tmp_path, name):
    copy = planted(folders["lm"], tmp_path)
    (copy / name).write_bytes(b"\x80")
    assert any(name in line for line in faults(copy))


@pytest.mark.parametrize(
    ("file", "words"),
    [("config.json", "no config.json"), ("model.safetensors", "no model.safetensors"), ("tokenizer.json", "no tok")],
)
def test_a_missing_file_is_a_fault(folders, tmp_path, file, words):
    copy = planted(folders["lm"], tmp_path)
    (copy / file).unlink()
    assert any(words in line for line in faults(copy))


def test_files_that_are_cut_or_no_json_are_faults(folders, tmp_path):
    copy = planted(folders["lm"], tmp_path)
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-8])
    assert any("not a whole safetensors file" in line for line in faults(copy))
    (copy / "config.json").write_text('{"model_type": ')
    assert any("not JSON" in line for line in faults(copy))
    (copy / "config.json").write_text("[1]")
    assert any("holds a list" in line for line in faults(copy))


def test_an_index_that_leads_out_of_the_folder_or_to_nothing_is_a_fault(folders, tmp_path):
    copy = planted(folders["lm"], tmp_path)
    index = copy / "model.safetensors.index.json"
    names = load_file(copy / "model.safetensors")
    for shard, words in (("../copy/model.safetensors", "points outside"), ("/etc/w.safetensors", "points outside"),
                         ("model-2.safetensors", "no model-2.safetensors")):  # fmt: skip
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        assert any(words in line for line in faults(copy))
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "another"], "model.safetensors")}))
    assert any("another is not in the shard" in line for line in faults(copy))
    index.write_text("{}")
    assert any("weight_map" in line for line in faults(copy))


def test_python_files_and_an_adapter_alone_are_faults(folders, tmp_path):
    copy = planted(folders["lm"], tmp_path)
    (copy / "modeling.py").write_text("")
    assert any("modeling.py" in line for line in faults(copy))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert any("draftsmith merge" in line for line in faults(adapter))
    (adapter / "config.json").write_text("{}")
    assert any("draftsmith merge" in line for line in faults(adapter)), "as our own training writes it"


AGAINST_TARGET = [
    ("vocabulary", "vocab_size is"), ("width", "reads hidden states of width"),
    ("layers", "reads the target's layer 3"), ("context", "max_position_embeddings is 256"),
    ("rope", "RoPE base"), ("tokenizer", "its tokenizer is not"), ("template", "trained with chat template"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "words"), AGAINST_TARGET)
def test_what_does_not_fit_the_target_is_found(folders, tokenizer, tmp_path, what, words):
    rows = len(tokenizer) + (8 if what == "vocabulary" else 0)
    other = make_llama(
        rows, layers=2 if what == "layers" else 3, seed=0, width=64 if what == "width" else 32,
        context=512 if what == "context" else 256,
    )  # fmt: skip
    if what == "rope":
        other.config.rope_parameters["rope_theta"] = 5e5
    other.save_pretrained(tmp_path / "target")
    theirs = make_tokenizer("entirely other words, zigzag zebra zoo") if what == "tokenizer" else tokenizer
    kept = theirs.chat_template
    if what == "template":
        theirs.chat_template = kept.replace("assistant", "helper")
    theirs.save_pretrained(tmp_path / "target")
    theirs.chat_template = kept
    found = faults(folders["eagle3"], str(tmp_path / "target"))
    assert any(words in line for line in found), found


def test_another_vocabulary_size_of_a_plain_draft_is_mended_by_an_export(folders, tokenizer, tmp_path):
    make_llama(len(tokenizer) + 8, layers=3, seed=0).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    assert any("draftsmith export" in line for line in faults(folders["lm"], str(tmp_path / "target")))


@pytest.mark.parametrize(
    ("name", "change"),
    [("eagle3 for vllm", lambda c: [d.update(rms_norm_eps=0.5) for d in (c, c["transformer_layer_config"])]),
     ("eagle3 for sglang", lambda c: (c.update({TAPS: [0, 1, 3]}), c["eagle_config"].update({TAPS: [-1, 0, 2]}))),
     ("lm for vllm", lambda c: c.update(rms_norm_eps=0.5))],
)  # fmt: skip
def test_an_exported_folder_that_computes_something_else_is_found(folders, tiny_target, tmp_path, name, change):
    copy = planted(folders[name], tmp_path, config=change)
    assert faults(copy, str(tiny_target)) == [], "nothing but the logits shows it"
    found = faults(copy, str(tiny_target), str(folders[name.split(" for ")[0]]))
    assert any("logits differ" in line for line in found), found


def test_that_logits_were_not_compared_is_said(folders, tiny_target, tmp_path):
    copy = planted(folders["lm for vllm"], tmp_path)
    (copy / "x.pt").write_bytes(b"\x80")
    found = examine(str(copy), str(tiny_target), str(folders["lm"]))
    assert any("logits were not compared" in finding.line() for finding in found)


def test_logits_are_compared_on_the_targets_text_only(folders):
    with pytest.raises(UserError, match="--target"):
        examine(str(folders["lm"]), None, str(folders["lm"]))


def test_the_verb_prints_a_line_per_finding_and_exits_with_1_for_a_fault(folders, tmp_path):
    copy = planted(folders["lm"], tmp_path, config=lambda c: c.update(dtype="bfloat16"))
    for folder, code in ((folders["lm"], 0), (copy, 1), (tmp_path / "nowhere", 2)):
        command = [sys.executable, "-c", "from distill.cli import main; main()", "doctor", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
        assert done.returncode == code, done.stderr
        if code == 1:
            assert done.stdout.splitlines()[0].startswith("fault: config.json says bfloat16")
            assert done.stdout.splitlines()[-1].endswith("1 fault")
