"""Draft kind `lm`: a causal LM of its own, over the target's vocabulary."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from decode.compiled import uncompiled
from decode.drafts.contract import Proposal
from decode.drafts.head import head_ids, scatter_logits
from decode.drafts.temperature import fitted_temperatures
from decode.draws import Draws
from decode.kv import Clock, Reader
from decode.laws import Law
from decode.models import Loaded
from decode.pairing import check_pair
from decode.quantise import in_float32


@dataclass
class LMState:
    """The committed text [B, L] and a reader that has read it all but for the last one or two tokens."""

    reader: Reader
    text: Tensor

    def clone(self) -> "LMState":
        return LMState(self.reader.clone(), self.text)


class LMDraft:
    """Any transformers causal LM as a draft (see contract.Draft), its head whole or trimmed (decode/drafts/head.py).

    Its laws are over the target's `rows` of vocabulary (default: its own). The padding rows in which the two differ
    are never chosen: Law.vocabulary sees to that for both.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: Any, rows: int | None = None) -> None:
        self.model = model
        self.context_tokens = int(model.config.max_position_embeddings)
        self.rows = rows or int(model.config.vocab_size)
        self.ids = head_ids(model)
        self.temperatures: Mapping[float, float] = fitted_temperatures(model.config)

    @classmethod
    def of_pair(cls, target: Loaded, draft: Loaded) -> "LMDraft":
        """The draft for this target. Raises UserError when the two do not fit (decode.models.check_pair)."""
        check_pair(target, draft)
        return cls(draft.model, int(target.model.config.vocab_size))

    def in_float32(self) -> "LMDraft":
        return LMDraft(in_float32(self.model), self.rows)

    def compiled(self, compile_model: Callable[[Any], Any]) -> "LMDraft":
        return LMDraft(compile_model(self.model), self.rows)

    def align(self, logits: Tensor) -> Tensor:
        """The draft's logits [..., V_d] as logits over the target's rows; rows that it lacks are at -inf."""
        if self.ids is not None:
            return scatter_logits(logits, self.ids, self.rows)
        shared = logits[..., : self.rows]
        return torch.nn.functional.pad(shared, (0, self.rows - shared.shape[-1]), value=-torch.inf)

    def start(self, text: Tensor, hidden: Tensor | None = None, clock: Clock = perf_counter) -> LMState:
        reader = Reader(self.model, clock)
        if text.shape[1] > 1:
            reader.read(text[:, :-1], keep=0)
            if not reader.can_rewind:
                raise UserError("this draft has a running state that cannot be taken back after a rejection")
        return LMState(reader, text)

    def propose(self, state: LMState, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        laws: list[Tensor] = []
        began_s = state.reader.forward_s
        text = state.text
        for _ in range(num_tokens):
            q = law(self.align(state.reader.read(text[:, state.reader.length :], keep=1)), text)
            text = torch.cat([text, draws.choose(q, text.shape[1])], dim=1)
            laws.append(q)
        return Proposal(text[:, -num_tokens:], torch.cat(laws, dim=1), state.reader.forward_s - began_s)

    def replayed(self, text: Tensor, hidden: Tensor | None, places: Tensor, steps: int) -> Iterator[Tensor]:
        yield self.align(uncompiled(self.model)(input_ids=text[:, : int(places[-1]) + 1], logits_to_keep=places).logits)

    def resume(
        self, state: LMState, text: Tensor, hidden: Tensor | None, length: int, clock: Clock = perf_counter
    ) -> LMState | None:
        if not state.reader.keeps_everything:
            return None
        reader = state.reader.beginning(min(length, text.shape[1] - 1), clock)
        if reader.length < text.shape[1] - 1:
            reader.read(text[:, reader.length : -1], keep=0)
        return LMState(reader, text)

    def commit(self, state: LMState, ids: Tensor, hidden: Tensor | None = None) -> None:
        # Drafted tokens that were accepted have been read already, all but the last one.
        state.text = torch.cat([state.text, ids], dim=1)
        state.reader.rewind(min(state.reader.length, state.text.shape[1] - 1))
