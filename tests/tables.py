"""A language model whose law is a table, with a real cache that holds token ids: a stale cache changes results."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig


class TableModel(nn.Module):
    """Logits depend on the last two tokens, read back from the cache. Everything is float64."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits.double(), requires_grad=False)  # [V, V, V]: before last, last, next
        self.config = LlamaConfig(vocab_size=logits.shape[-1], num_hidden_layers=1, max_position_embeddings=64)

    def forward(self, input_ids: Tensor, cache=None, use_cache=True, logits_to_keep=0, output_hidden_states=False):
        ids = input_ids.double()[:, None, :, None]
        seen, _ = cache.update(ids, ids, 0)
        text = seen[:, 0, :, 0].long()
        before = torch.cat([torch.zeros_like(text[:, :1]), text[:, :-1]], dim=1)
        logits = self.table[before, text][:, -input_ids.shape[1] :]
        return SimpleNamespace(logits=logits if isinstance(logits_to_keep, int) else logits[:, logits_to_keep])


def random_table(vocabulary: int, seed: int, sharpness: float = 1.5) -> TableModel:
    generator = torch.Generator().manual_seed(seed)
    return TableModel(
        sharpness * torch.randn(vocabulary, vocabulary, vocabulary, generator=generator, dtype=torch.float64)
    )
