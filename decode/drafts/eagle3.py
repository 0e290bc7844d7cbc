"""Draft kind `eagle3`: a feature draft that reads the target's hidden states (decode/drafts/eagle3_model.py)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from decode.drafts.contract import Proposal
from decode.drafts.eagle3_model import KeysValues, LlamaForCausalLMEagle3, unroll
from decode.drafts.head import scatter_logits
from decode.drafts.temperature import fitted_temperatures
from decode.draws import Draws
from decode.kv import Clock
from decode.laws import Law
from decode.quantise import in_float32


@dataclass
class Eagle3State:
    """The committed text [B, L], its features that no entry has read yet, the keys of entries with true ones, and the
    draft's hidden state [B, 1, D] of the last of these.

    The keys of a drafted chain are not kept: committed tokens are read again, with the target's own features.
    """

    text: Tensor
    unread: Tensor
    clock: Clock
    past: KeysValues | None = None
    last: Tensor | None = None

    def clone(self) -> "Eagle3State":
        return replace(self)


class Eagle3Draft:
    """A feature draft with the embeddings of its target (see contract.Draft). Its laws are over the target's ids."""

    def __init__(self, model: LlamaForCausalLMEagle3, embeddings: nn.Module) -> None:
        self.model, self.embeddings = model, embeddings
        self.taps = model.taps
        self.context_tokens = int(model.config.max_position_embeddings)
        self.rows = int(model.config.vocab_size)
        self.ids = model.draft_ids
        self.temperatures: Mapping[float, float] = fitted_temperatures(model.config)

    def in_float32(self) -> "Eagle3Draft":
        return Eagle3Draft(in_float32(self.model), copy.deepcopy(self.embeddings).float())

    def compiled(self, compile_model: Callable[[Any], Any]) -> "Eagle3Draft":
        """As it is: one layer whose past grows gains nothing from a graph of fixed size."""
        return self

    def align(self, logits: Tensor) -> Tensor:
        """The head's logits [..., V_d] as logits over the target's rows; ids that it lacks are at -inf."""
        return logits if self.ids is None else scatter_logits(logits, self.ids, self.rows)

    def start(self, text: Tensor, hidden: Tensor | None, clock: Clock = perf_counter) -> Eagle3State:
        assert hidden is not None
        state = Eagle3State(text, hidden, clock)
        self._read_committed(state)
        return state

    def propose(self, state: Eagle3State, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        text, laws, forward_s = state.text, [], 0.0
        began = state.clock()
        self._read_committed(state)
        hidden, chain = state.last, state.past
        assert hidden is not None
        for step in range(num_tokens):
            if step:
                began = state.clock()
                position = torch.full((1, 1), text.shape[1] - 2, device=text.device)
                hidden, chain = self.model(self._embedded(text[:, -1:]), hidden, position, chain)
            logits = self.model.logits(hidden)
            forward_s += state.clock() - began
            q = law(self.align(logits), text)
            text = torch.cat([text, draws.choose(q, text.shape[1])], dim=1)
            laws.append(q)
        return Proposal(text[:, -num_tokens:], torch.cat(laws, dim=1), forward_s)

    def resume(
        self, state: Eagle3State, text: Tensor, hidden: Tensor | None, length: int, clock: Clock = perf_counter
    ) -> Eagle3State:
        assert hidden is not None
        assert state.past is not None
        # An entry holds a token's features and the next one's embedding: the last common token's is another.
        keys, values = state.past
        kept = min(keys.shape[2], length - 1)
        again = Eagle3State(text, hidden[:, kept:], clock, (keys[:, :, :kept], values[:, :, :kept]))
        self._read_committed(again)
        return again

    def commit(self, state: Eagle3State, ids: Tensor, hidden: Tensor | None) -> None:
        assert hidden is not None
        state.text = torch.cat([state.text, ids], dim=1)
        state.unread = torch.cat([state.unread, hidden], dim=1)

    def replayed(self, text: Tensor, hidden: Tensor | None, places: Tensor, steps: int) -> Iterator[Tensor]:
        assert hidden is not None
        entries = text.shape[1] - 1
        positions = torch.arange(entries, device=text.device).unsqueeze(0)
        features = self.model.fc(hidden[:, :entries].to(self.model.dtype))
        found = unroll(self.model, self._embedded(text[:, 1:]), features, positions, steps)
        # The token after place t is the one that step j of entry t - 1 - j predicts.
        for j, out in enumerate(found):
            yield self.align(self.model.logits(out[:, (places - 1 - j).clamp(min=0)]))

    def _read_committed(self, state: Eagle3State) -> None:
        """Read the committed tokens that are new."""
        T, L = state.unread.shape[1], state.text.shape[1] - 1
        if T == 0:
            return
        positions = torch.arange(L - T, L, device=state.text.device).unsqueeze(0)
        features = self.model.fc(state.unread.to(self.model.dtype))
        embedded = self._embedded(state.text[:, -T:])
        state.last, state.past = self.model(embedded, features, positions, state.past, first=T - 1)
        state.unread = state.unread[:, :0]

    def _embedded(self, ids: Tensor) -> Tensor:
        """The target's embeddings, in the draft's dtype, which may be another in training."""
        embedded: Tensor = self.embeddings(ids).to(self.model.dtype)
        return embedded
