"""What the decoder asks of a draft. It never asks what kind of draft it is."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from decode.draws import Draws
from decode.laws import Law

State = TypeVar("State")


@dataclass(frozen=True)
class Proposal:
    """A drafted chain: tokens [B, K] and the laws they were drawn from, q [B, K, V]."""

    tokens: Tensor
    q: Tensor


class Draft(Protocol[State]):
    """A draft follows the committed text and proposes how it goes on. Its state is explicit and clonable."""

    def start(self, ids: Tensor) -> State:
        """Begin to follow the committed text `ids` [B, T]."""
        ...

    def propose(self, state: State, num_tokens: int, law: Law, draws: Draws) -> Proposal:
        """Draft `num_tokens` >= 1 tokens after the committed text, each drawn from `law` of the draft's logits."""
        ...

    def commit(self, state: State, ids: Tensor) -> None:
        """Append `ids` [B, T] to the committed text and drop whatever of the last proposal is not in it."""
        ...
