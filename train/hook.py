"""What the training loop asks of whoever measures."""

from typing import NamedTuple, Protocol

Evidence = list[list[float]]


class Measured(NamedTuple):
    """Named values, some text to look at, and what `still_rises` judges by."""

    values: dict[str, float]
    samples: dict[str, str]
    evidence: Evidence


class Hook(Protocol):
    """Measures the module on what it was not trained on."""

    score: str  # the name of the value that is to rise

    def measure(self) -> Measured:
        """Every process calls this, and gets the values of all together."""
        ...

    def still_rises(self, before: Evidence, now: Evidence) -> bool:
        """Whether the score of `now` is above that of `before`, beyond chance."""
        ...
