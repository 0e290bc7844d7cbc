"""A model that begins as a GGUF file is a plain one ever after."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_llama, make_tokenizer
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.errors import UserError
from decode.models import load_model
from distill.build import build_lm_draft, save_draft
from train.publish.doctor import examine
from train.publish.export import export

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """A tiny Llama as llama.cpp's converter writes it, with its tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokenizer = make_tokenizer()
    model = make_llama(len(tokenizer), layers=3, seed=0)
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ordered = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(ordered)
    writer.add_token_types([TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in ordered])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in words["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        layer = name.removeprefix("model.layers.").split(".", 1)
        inner = layer[1].removesuffix(".weight") if name.startswith("model.layers.") else ""
        outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        writer.add_tensor(outer.get(name) or f"blk.{layer[0]}.{NAMES[inner]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_e01_a_draft_from_a_gguf_file_trains_saves_and_comes_back_without_a_trace_of_it(gguf_file, tmp_path):
    target = load_model(str(gguf_file), "float32")
    draft = build_lm_draft(target.model, (0, 1)).train()
    ids = torch.arange(3, 40).unsqueeze(0)
    draft(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter -= 0.01 * parameter.grad
    save_draft(draft.eval(), target, "lm", {}, tmp_path / "draft")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert torch.allclose(again(ids).logits, draft(ids).logits, atol=1e-5)
    config = (tmp_path / "draft/config.json").read_text()
    assert "quantization" not in config
    assert "gguf" not in config.lower()
    assert str(tmp_path.parent) not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert tokenizer.chat_template == target.tokenizer.chat_template
    assert tokenizer("warm tea").input_ids == target.tokenizer("warm tea").input_ids
    assert examine(str(tmp_path / "draft")) == []
    assert export(str(tmp_path / "draft"), tmp_path / "out", "vllm", str(gguf_file)).folder.is_dir()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_e01_a_copy_that_was_cut_off_is_named_as_such(gguf_file, tmp_path, share):
    whole = gguf_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"not a whole GGUF file .* download it again"):
        load_model(str(tmp_path / "cut.gguf"))
