"""`evaluate.load("eval/metrics/accepted_length")`: tokens for each pass of the target."""

from typing import Any

import datasets
import evaluate

DESCRIPTION = """τ, tokens emitted for each pass of the target: the pass's own token is in, the one that reading the
prompt gave is out, and what lies after the end of an answer is cut (Spec-Bench's mean accepted tokens)."""
INPUTS = """
Args:
    predictions: accepted tokens of each round.
    references: emitted tokens of each round; one more than accepted, or as many where the answer ended in its draft.
Returns:
    mean_accepted_length: τ; None without rounds.
    mean_accepted_drafts: the accepted ones alone (gpt-fast).
"""


class AcceptedLength(evaluate.Metric):  # type: ignore[misc]
    """Σ emitted ÷ rounds."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float | None]:
        for accepted, emitted in zip(predictions, references, strict=True):
            if not 0 <= emitted - accepted <= 1:
                raise ValueError(f"a round that accepted {accepted} cannot have emitted {emitted} tokens")
        rounds = len(references)
        return {
            "mean_accepted_length": sum(references) / rounds if rounds else None,
            "mean_accepted_drafts": sum(predictions) / rounds if rounds else None,
        }
