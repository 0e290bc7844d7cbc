"""The frozen target as a teacher, in the same process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from train.parallel import Lockstep, shard_frozen


class Teacher:
    """A causal LM in evaluation mode: no gradient, no optimiser, no place in a checkpoint.

    It is held outside every nn.Module, so that nothing that trains the draft can find it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)
        self._lockstep: Lockstep | None = None

    def shard(self, accelerator: Any) -> None:
        """Share the layers' weights out over the processes' devices; a pass is then one of all processes together.

        Raises UserError for a model whose layers are not found.
        """
        body = self._model.get_decoder()
        if not hasattr(body, "layers"):
            raise UserError(
                f"teacher=sharded: a {self._model.config.model_type} model names its layers otherwise; use replicated"
            )
        shard_frozen(body.layers, accelerator.device.type)
        some_ids = torch.zeros(1, 1, dtype=torch.long, device=accelerator.device)
        self._lockstep = Lockstep(body, accelerator, lambda: read_body(self._model, some_ids, None))

    def finish(self) -> None:
        """Where processes take different numbers of passes, each calls this after its own: all go on together."""
        if self._lockstep:
            self._lockstep.finish()

    def hidden(self, ids: Tensor, predicts: Tensor, positions: Tensor | None = None) -> Tensor:
        """Last hidden states at the supervised positions. ids, predicts, positions [B, T] -> [N, D]."""
        return self.read(ids, predicts, positions)[0]

    @torch.no_grad()
    def read(
        self, ids: Tensor, predicts: Tensor, positions: Tensor | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """`hidden`, and every position's hidden states at `taps` (0: embeddings) side by side, [B, T, D·taps]."""
        output = read_body(self._model, ids, positions, output_hidden_states=bool(taps))
        tapped = [output.hidden_states[tap] for tap in taps] or [output.last_hidden_state[..., :0]]
        return output.last_hidden_state[predicts], torch.cat(tapped, dim=-1)

    @torch.no_grad()
    def embedded(self, ids: Tensor) -> Tensor:
        """The input embeddings of ids [B, T] -> [B, T, D]."""
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        return embedded

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


@torch.no_grad()
def check_packing(model: Any, ids: Tensor, name: str) -> None:
    """Raises UserError for a model in which rows that share a sequence see each other. ids [1, T >= 2]."""
    half = ids.shape[1] // 2
    positions = torch.cat([torch.arange(half), torch.arange(ids.shape[1] - half)]).unsqueeze(0).to(ids.device)
    together = last_hidden(model, ids, positions)[:, half:].float()
    alone = last_hidden(model, ids[:, half:]).float()
    if not torch.allclose(together, alone, rtol=1e-2, atol=1e-2 * float(alone.std())):
        raise UserError(
            f"{name}: in a {model.config.model_type} model rows that are packed into one sequence see each other; "
            "leave data.pack out"
        )


def last_hidden(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Last hidden states of every position. ids, positions [B, T] -> [B, T, D].

    Positions that start again within a sequence keep attention inside each run of them.
    """
    return read_body(model, ids, positions).last_hidden_state


def read_body(model: Any, ids: Tensor, positions: Tensor | None, **options: Any) -> Any:
    """What the model's layers give, without its head."""
    body: nn.Module = model.get_decoder()
    return body(input_ids=ids, position_ids=positions, use_cache=False, **options)
