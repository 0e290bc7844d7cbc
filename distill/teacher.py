"""The frozen target as a teacher, in the same process."""

from typing import Any

import torch
from torch import Tensor, nn


class Teacher:
    """A causal LM in evaluation mode: no gradient, no optimiser, no place in a checkpoint.

    It is held outside every nn.Module, so that nothing that trains the draft can find it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def hidden(self, ids: Tensor, predicts: Tensor) -> Tensor:
        """Last hidden states at the supervised positions. ids, predicts [B, T] -> [N, D]."""
        return last_hidden(self._model, ids)[predicts]

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, D]: logits = hidden @ head_weight.T."""
        return self._model.get_output_embeddings().weight


def last_hidden(model: Any, ids: Tensor) -> Tensor:
    """Last hidden states of every position. ids [B, T] -> [B, T, D]."""
    body: nn.Module = model.get_decoder()
    return body(input_ids=ids, use_cache=False).last_hidden_state
