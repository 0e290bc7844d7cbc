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
    """The reader, and the committed tokens [B, P] that it has not read yet (P >= 1 when proposing)."""

    reader: Reader
    unread: Tensor
    committed: int

    def clone(self) -> "LMState":
        return LMState(self.reader.clone(), self.unread, self.committed)


class LMDraft:
    """Any transformers causal LM as a draft (see contract.Draft)."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self, ids: Tensor) -> LMState:
        reader = Reader(self.model)
        if ids.shape[1] > 1:
            reader.read(ids[:, :-1], keep=1)
        return LMState(reader, unread=ids[:, -1:], committed=ids.shape[1])

    def propose(self, state: LMState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        unread = state.unread
        for _ in range(num_tokens):
            q = law(state.reader.read(unread, keep=1)[:, -1])
            unread = draws.choose(q).unsqueeze(-1)
            tokens.append(unread)
            laws.append(q)
        return Proposal(torch.cat(tokens, dim=1), torch.stack(laws, dim=1))

    def commit(self, state: LMState, ids: Tensor) -> None:
        # Drafted tokens that were accepted have been read already, all but the last one.
        text = torch.cat([state.unread, ids], dim=1)
        already_committed = state.committed - state.unread.shape[1]
        state.committed += ids.shape[1]
        state.reader.rewind(min(state.reader.length, state.committed - 1))
        state.unread = text[:, state.reader.length - already_committed :]
