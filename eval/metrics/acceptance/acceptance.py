"""`evaluate.load("eval/metrics/acceptance")`: the share of drafted tokens that were accepted."""

from typing import Any

import datasets
import evaluate

DESCRIPTION = """d, accepted ÷ drafted tokens (vLLM's and llama.cpp's acceptance rate). It falls as more is drafted in a
round, whatever the draft. Tokens that were accepted after the end of an answer must not be counted."""
INPUTS = """
Args:
    predictions: accepted tokens of each round.
    references: drafted tokens of each round; a round may draft none.
Returns:
    acceptance_rate: a number from 0 to 1; None when nothing was drafted.
"""


class Acceptance(evaluate.Metric):  # type: ignore[misc]
    """Σ accepted ÷ Σ drafted over rounds."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float | None]:
        for accepted, drafted in zip(predictions, references, strict=True):
            if not 0 <= accepted <= drafted:
                raise ValueError(f"a round accepted {accepted} of {drafted} drafted tokens")
        drafted = sum(references)
        return {"acceptance_rate": sum(predictions) / drafted if drafted else None}
