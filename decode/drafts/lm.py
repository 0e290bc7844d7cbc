"""Draft kind `lm`: a causal LM of its own, over the target's vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.drafts.contract import Proposal
from decode.draws import Draws
from decode.kv import Reader
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

    def start(self, ids: Tensor) -> LMState:
        reader = Reader(self.model)
        if ids.shape[1] > 1:
            reader.read(ids[:, :-1], keep=1)
        return LMState(reader, ids)

    def propose(self, state: LMState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        laws: list[Tensor] = []
        text = state.text
        for _ in range(num_tokens):
            q = law(state.reader.read(text[:, state.reader.length :], keep=1), text)
            text = torch.cat([text, draws.choose(q, text.shape[1])], dim=1)
            laws.append(q)
        return Proposal(text[:, -num_tokens:], torch.cat(laws, dim=1))

    def commit(self, state: LMState, ids: Tensor) -> None:
        # Drafted tokens that were accepted have been read already, all but the last one.
        state.text = torch.cat([state.text, ids], dim=1)
        state.reader.rewind(min(state.reader.length, state.text.shape[1] - 1))
