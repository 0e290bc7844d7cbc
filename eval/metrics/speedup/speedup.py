"""`evaluate.load("eval/metrics/speedup")`: how much faster one way of decoding is, with its interval."""

from typing import Any

import datasets
import evaluate

from eval.stats import Timed, speedup, speedup_interval

DESCRIPTION = """S, Σ plain time ÷ Σ other time over the same prompts, per token where the answers differ in length; its
95 % interval is a paired bootstrap over prompts. Neither the mean of ratios nor the ratio of mean paces."""
INPUTS = """
Args:
    predictions: seconds that the measured way of decoding took for each prompt.
    references: seconds that plain decoding took for the same prompts.
    prediction_tokens, reference_tokens: their tokens; left out where they are equal.
Returns:
    speedup: S; None where no prompt has a token.
    speedup_ci: [low, high]; None below five prompts.
"""


class Speedup(evaluate.Metric):  # type: ignore[misc]
    """Paired over prompts."""

    def _info(self) -> Any:
        seconds = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": seconds, "references": seconds}),
        )

    def _compute(
        self, predictions: list[float], references: list[float], prediction_tokens: list[int] | None = None,
        reference_tokens: list[int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        ours = _timed(predictions, prediction_tokens)
        plain = _timed(references, reference_tokens)
        interval = speedup_interval(plain, ours)
        return {"speedup": speedup(plain, ours), "speedup_ci": list(interval) if interval else None}


def _timed(seconds: list[float], tokens: list[int] | None) -> list[Timed]:
    return [Timed(s, n) for s, n in zip(seconds, tokens or [1] * len(seconds), strict=True)]
