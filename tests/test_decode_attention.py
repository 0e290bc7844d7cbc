"""Grouped attention equals torch's own, and a model that uses it is the model that was saved."""

import copy

import pytest
import torch
from conftest import make_llama
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from decode.attention import MOST_QUERIES, NAME, grouped_attention, use_grouped_attention
from decode.kv import Reader
from decode.models import load_model


@pytest.mark.parametrize("tokens", [1, 3, MOST_QUERIES])
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_attention_with_every_key_and_value_repeated(tokens, heads, groups, masked):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, tokens, 16, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, groups, 70, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(2, 1, tokens, 70, generator=generator) < 0.5
        mask[..., 0] = True
    repeated = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(grouped_attention(query, key, value, mask, 0.3), expected, atol=1e-12, rtol=1e-12)


def models():
    yield "llama", make_llama(60, layers=2, seed=0)
    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}  # fmt: skip
    torch.manual_seed(0)
    yield "mistral", MistralForCausalLM(MistralConfig(**shape)).eval()
    yield "gemma3", Gemma3ForCausalLM(Gemma3TextConfig(**shape, sliding_window_pattern=2)).eval()


@pytest.mark.parametrize(("name", "model"), list(models()), ids=[name for name, _ in models()])
@torch.no_grad()
def test_a_model_reads_piece_by_piece_what_it_reads_with_transformers_own_attention(name, model):
    """Windows of 6 tokens, blocks that cross them, and taking back."""
    model = model.double()
    text = torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=text).logits
    grouped = copy.deepcopy(model)
    use_grouped_attention(grouped)
    assert grouped.config._attn_implementation == NAME
    reader, read = Reader(grouped), []
    for width in (7, 1, 3, 1, 5, 1, 9, 3):
        read.append(reader.read(text[:, reader.length : reader.length + width]))
        reader.read(torch.tensor([[4, 5]]))
        reader.rewind(reader.length - 2)
    torch.testing.assert_close(torch.cat(read, dim=1), expected, atol=1e-10, rtol=1e-10)


def test_what_is_saved_of_a_loaded_model_says_nothing_of_it(tiny_target, tmp_path):
    loaded = load_model(str(tiny_target))
    assert loaded.model.config._attn_implementation == NAME
    loaded.model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_model_that_was_loaded_with_another_attention_keeps_it(tiny_target):
    model = AutoModelForCausalLM.from_pretrained(tiny_target, attn_implementation="eager")
    use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"
