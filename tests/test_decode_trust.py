"""What a model brings along is not run, and not looked for elsewhere, unless the user says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import ROOT, environment
from safetensors.torch import load_file

from configs.errors import UserError
from decode.models import load_model
from decode.trust import PICKLE

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def folder(tiny_draft, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_draft, tmp_path / "model"))


def with_code(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "architectures": ["OddForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(CODE)
    return folder


def test_a_model_with_code_of_its_own_is_refused_and_the_flag_named(folder):
    with pytest.raises(UserError, match=r"--trust-remote-code .*DRAFTSMITH_TRUST_REMOTE_CODE=1"):
        load_model(str(with_code(folder)))


def test_the_flag_before_the_verb_lets_it_run(folder, tiny_target):
    command = [sys.executable, "-c", "from distill.cli import main; main()", "--trust-remote-code", "decode"]
    command += ["--target", str(with_code(folder)), "--prompt", "tea", "--max-new-tokens", "4", "--json"]
    home = environment() | {"HF_MODULES_CACHE": str(folder.parent / "modules")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=home)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["token_ids"]) <= 4
    refused = subprocess.run([c for c in command if c != "--trust-remote-code"], capture_output=True, text=True,
                             cwd=ROOT, env=home, stdin=subprocess.DEVNULL)  # fmt: skip
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_pickled_weights_are_refused_unless_they_are_allowed(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled.*--allow-pickle"):
        load_model(str(folder))
    monkeypatch.setenv(PICKLE, "1")
    assert torch.equal(
        load_model(str(folder)).model.get_input_embeddings().weight, weights["model.embed_tokens.weight"]
    )


def test_pickled_adapters_are_refused_unless_they_are_allowed(tiny_draft, tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(load_model(str(tiny_draft), "float32").model, LoraConfig(r=2, target_modules="all-linear"))
    wrapped.save_pretrained(tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    torch.save(weights, tmp_path / "adapter/adapter_model.bin")
    with pytest.raises(UserError, match=r"--allow-pickle"):
        load_model(str(tmp_path / "adapter"))
    monkeypatch.setenv(PICKLE, "1")
    load_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", "..\\x.safetensors", ".."])
def test_a_shard_outside_of_the_folder_is_refused(folder, shard):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, shard)}))
    with pytest.raises(UserError, match="points outside of the folder"):
        load_model(str(folder))
