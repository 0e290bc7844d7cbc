"""How each kind of draft is read in training: the hidden states of its head at every supervised place.

Shapes: B sequences, T tokens, N supervised places, K unrolled steps, D the draft's hidden.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decode.drafts.eagle3_model import unroll
from distill.teacher import last_hidden


class Unrolled(NamedTuple):
    """hidden [K, N, D]: item k is for a token that is drafted as number k + 1 of a round. `there` [K, N] is False
    where no round could have drafted it so."""

    hidden: Tensor
    there: Tensor


class LMStudent(nn.Module):
    """A causal LM: its law does not depend on where a round began, so K = 1."""

    steps = 1

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        for model in (self.model.get_decoder(), self.model):
            if hasattr(model, "layers"):
                found: nn.ModuleList = model.layers
                return found
        return nn.ModuleList()  # some name them otherwise

    def forward(self, ids: Tensor, predicts: Tensor, positions: Tensor | None = None) -> Unrolled:
        """ids, predicts, positions [B, T], as in distill.batches.Batch."""
        hidden = last_hidden(self.model, ids, positions)[predicts].unsqueeze(0)
        return Unrolled(hidden, hidden.new_ones(hidden.shape[:2], dtype=torch.bool))


class Eagle3Student(nn.Module):
    """A feature draft, unrolled over `steps` (decode.drafts.eagle3_model.unroll)."""

    def __init__(self, model: Any, steps: int) -> None:
        super().__init__()
        self.model, self.steps = model, steps

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def forward(
        self, ids: Tensor, predicts: Tensor, tapped: Tensor, embedded: Tensor, positions: Tensor | None = None
    ) -> Unrolled:
        """ids, predicts, positions [B, T]; of every token the target's tapped [B, T, E·taps] and embedded [B, T, E]."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        row, place = predicts.nonzero(as_tuple=True)
        first = max(0, int(place.min()) - self.steps)
        dtype = self.model.fc.weight.dtype
        features, known = self.model.fc(tapped[:, :-1].to(dtype)), embedded[:, 1:].to(dtype)
        outputs = unroll(self.model, known, features, positions[:, :-1], self.steps, first)
        # Step k of entry i predicts token i + 2 + k, whose law is the target's at i + 1 + k.
        entries = [place - 1 - k for k in range(self.steps)]
        hidden = [out[row, (entry - first).clamp(min=0)] for out, entry in zip(outputs, entries, strict=True)]
        there = [positions[row, place] - 1 - k >= 0 for k in range(self.steps)]
        return Unrolled(self.model.norm(torch.stack(hidden)), torch.stack(there))


Student = LMStudent | Eagle3Student


def save_memory(student: Student) -> None:
    """Keep no activations inside the layers: the backward pass makes them anew."""
    student.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
