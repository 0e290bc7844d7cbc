"""Draft kind `lm`: a causal LM of its own, over the target's vocabulary."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Proposal
from decode.draws import Draws
from decode.kv import Clock, Reader
from decode.laws import Law


@dataclass
class LMState:
    """The committed text [B, L] and a reader that has read it all but for the last one or two tokens."""

    reader: Reader
    text: Tensor

    def clone(self) -> "LMState":
        return LMState(self.reader.clone(), self.text)


class LMDraft:
    """Any transformers causal LM as a draft (see contract.Draft)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.context_tokens = int(model.config.max_position_embeddings)

    def start(self, ids: Tensor, clock: Clock = perf_counter) -> LMState:
        reader = Reader(self.model, clock)
        if ids.shape[1] > 1:
            reader.read(ids[:, :-1], keep=1)
        return LMState(reader, ids)

    def propose(self, state: LMState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        laws: list[Tensor] = []
        began_s = state.reader.forward_s
        text = state.text
        for _ in range(num_tokens):
            q = law(state.reader.read(text[:, state.reader.length :], keep=1), text)
            text = torch.cat([text, draws.choose(q, text.shape[1])], dim=1)
            laws.append(q)
        return Proposal(text[:, -num_tokens:], torch.cat(laws, dim=1), state.reader.forward_s - began_s)

    def commit(self, state: LMState, ids: Tensor) -> None:
        # Drafted tokens that were accepted have been read already, all but the last one.
        state.text = torch.cat([state.text, ids], dim=1)
        state.reader.rewind(min(state.reader.length, state.text.shape[1] - 1))
