"""The frozen target as a teacher, in the same process."""

from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError


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


@torch.no_grad()
def check_plain_head(model: Any, ids: Tensor, name: str) -> None:
    """Training takes logits as hidden @ head.T. Raises UserError for a model that does more to them.

    ids [1, T] are any tokens. Soft-capping, scaling and a head bias are what other families add.
    """
    expected = model(input_ids=ids, use_cache=False).logits.float()
    found = (last_hidden(model, ids) @ model.get_output_embeddings().weight.T).float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.std())):
        raise UserError(
            f"{name}: a {model.config.model_type} model changes its logits after the head (soft cap, scale or bias), "
            "which distillation does not support; its logits would be wrong"
        )


def last_hidden(model: Any, ids: Tensor) -> Tensor:
    """Last hidden states of every position. ids [B, T] -> [B, T, D]."""
    body: nn.Module = model.get_decoder()
    return body(input_ids=ids, use_cache=False).last_hidden_state
