"""What the training loop asks of whoever supplies the rows."""

from typing import Any, Protocol


class Batches(Protocol):
    """The rows of a step are a function of the step, so a resumed run sees the same ones."""

    def micro_batches(self, step: int) -> list[dict[str, Any]]:
        """Inputs of the module for each forward pass of this process in step `step`; equally many everywhere."""
        ...

    def supervised_tokens(self, step: int) -> int:
        """Supervised tokens of step `step` over all processes together: what its loss is divided by."""
        ...

    def planned_tokens(self, step: int) -> int:
        """The same as far as it is known before the run has come there."""
        ...
