"""What the decoder asks of a draft. It never asks what kind of draft it is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from decode.draws import Draws
from decode.kv import Clock
from decode.laws import Law

State = TypeVar("State")


@dataclass(frozen=True)
class Proposal:
    """A drafted chain: tokens [B, K], the laws they were drawn from, q [B, K, V], and the seconds in forwards.

    q is over the target's V ids. A draft that gives no probabilities sets q one-hot at its tokens: that is their law.
    """

    tokens: Tensor
    q: Tensor
    forward_s: float


class Draft(Protocol[State]):
    """A draft follows the committed text and proposes how it goes on. Its state is explicit and clonable.

    `model` has its weights. `context_tokens` is how long a text it can follow; beyond it the decoder takes plain steps.
    `taps` names the target's hidden states that it reads (decode.kv.Reader), often none. The target has read every
    committed token but the last, so hidden states [B, T, D·taps] always belong to the tokens one place before those
    they come with. `temperatures` are the draft's best ones for some of the target's (decode/drafts/temperature.py).
    """

    model: Any
    context_tokens: int
    taps: tuple[int, ...]
    temperatures: Mapping[float, float]

    def start(self, text: Tensor, hidden: Tensor | None, clock: Clock = ...) -> State:
        """Begin to follow the committed `text` [B, L]; `hidden` is that of its first L - 1 tokens, or None (no taps).

        `clock` times the draft's forwards.
        """
        ...

    def propose(self, state: State, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        """Draft `num_tokens` >= 1 tokens after the committed text, each drawn from `law` of the draft's logits.

        Fewer, even none, are allowed where that does not depend on what was drawn.
        """
        ...

    def replayed(self, text: Tensor, hidden: Tensor | None, places: Tensor, steps: int) -> Iterator[Tensor]:
        """Teacher-forced logits [B, N, V] of the tokens after `places` [N] of `text` [B, L], ascending.

        Item j is for a token that is drafted as number j + 1 of a round; the last item is for all later ones too, so
        a draft whose law does not depend on that gives one. `hidden` is that of the text's tokens, as in `start`.
        """
        ...

    def in_float32(self) -> "Draft[State]":
        """A copy of it in float32, for checks."""
        ...

    def compiled(self, compile_model: Callable[[Any], Any]) -> "Draft[State]":
        """The same draft with its forwards compiled by `compile_model`, where that helps."""
        ...

    def resume(
        self, state: State, text: Tensor, hidden: Tensor | None, length: int, clock: Clock = ...
    ) -> State | None:
        """As `start`, from a `state` of a text with the same first `length` >= 1 tokens, which stays as it is.

        Only what is new is read. None where the state cannot go back that far.
        """
        ...

    def commit(self, state: State, ids: Tensor, hidden: Tensor | None) -> None:
        """Append `ids` [B, T] to the committed text and drop whatever of the last proposal is not in it.

        `hidden` [B, T, D·taps] belongs to the text's last token before `ids` and to all of `ids` but the last.
        """
        ...
