"""What the decoder asks of a draft. It never asks what kind of draft it is."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from decode.draws import Draws
from decode.kv import Clock
from decode.laws import Law

State = TypeVar("State")


@dataclass(frozen=True)
class Proposal:
    """A drafted chain: tokens [B, K], the laws they were drawn from, q [B, K, V], and the seconds in forwards."""

    tokens: Tensor
    q: Tensor
    forward_s: float


class Draft(Protocol[State]):
    """A draft follows the committed text and proposes how it goes on. Its state is explicit and clonable.

    `context_tokens` is how long a text it can follow; beyond it the decoder takes plain steps.
    """

    context_tokens: int

    def start(self, ids: Tensor, clock: Clock = ...) -> State:
        """Begin to follow the committed text `ids` [B, T]; `clock` times its forwards."""
        ...

    def propose(self, state: State, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        """Draft `num_tokens` >= 1 tokens after the committed text, each drawn from `law` of the draft's logits."""
        ...

    def commit(self, state: State, ids: Tensor) -> None:
        """Append `ids` [B, T] to the committed text and drop whatever of the last proposal is not in it."""
        ...
