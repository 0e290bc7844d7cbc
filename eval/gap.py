"""Why a measured speed-up is not the predicted one: the ratio of the two as a product of five factors and a rest."""

from collections.abc import Sequence
from math import exp, log

from pydantic import BaseModel

from decode.length import Costs
from decode.trace import Round, Tally
from eval.replay import Replay, at_positions, expected_rounds


class Gap(BaseModel):
    """measured ÷ predicted, and the factors whose product it is: above 1 the run was better than foreseen.

    acceptance: rounds kept more or fewer drafted tokens than replay says. truncation: the target's own token that a
    round loses where an answer ends in its draft. draft, verify, overhead: what each took in plain steps of the run,
    against the profile. rest: decoding outside rounds.
    """

    predicted: float
    measured: float
    acceptance: float
    truncation: float
    draft: float
    verify: float
    overhead: float
    rest: float


def explain(
    predicted: float, measured: float, rounds: Sequence[Round], texts: Sequence[Replay], num_draft_tokens: int,
    verifier: str, costs: Costs, plain_step_s: float,
) -> Gap:  # fmt: skip
    """`texts` and `costs` are what `predicted` came from; `plain_step_s` is the run's own mean plain step."""
    tally = Tally.of(rounds)
    seen_whole, seen = 1 + tally.accepted / tally.rounds, tally.emitted / tally.rounds
    foreseen_whole, foreseen = _replayed(texts, num_draft_tokens, verifier)
    draft_s, verify_s = sum(r.draft_s for r in rounds), sum(r.verify_s for r in rounds)
    spent = [draft_s, verify_s, sum(r.round_s for r in rounds) - draft_s - verify_s]
    took = [seconds / tally.rounds / plain_step_s for seconds in spent]
    planned = [num_draft_tokens * costs.c, costs.v[num_draft_tokens + 1], costs.o]
    draft, verify, overhead = _shares(planned, took)
    return Gap(
        predicted=predicted,
        measured=measured,
        acceptance=seen_whole / foreseen_whole,
        truncation=(seen / seen_whole) / (foreseen / foreseen_whole),
        draft=draft,
        verify=verify,
        overhead=overhead,
        rest=measured / (seen / sum(took)),
    )


def _replayed(texts: Sequence[Replay], num_draft_tokens: int, verifier: str) -> tuple[float, float]:
    """Replayed tokens of a round: 1 + accepted, and those that were emitted."""
    rounds = sum(sum(expected_rounds(text, num_draft_tokens, verifier)) for text in texts)
    accepted = sum(at.accepted for text in texts for at in at_positions(text, num_draft_tokens, verifier))
    return 1 + accepted / rounds, sum(map(len, texts)) / rounds


def _shares(planned: Sequence[float], took: Sequence[float]) -> list[float]:
    """Factors whose product is Σ planned ÷ Σ took: each part's is by its share of the difference."""
    difference = sum(took) - sum(planned)
    if abs(difference) < 1e-12:
        return [1.0] * len(planned)
    whole = log(sum(planned) / sum(took))
    return [exp(whole * (b - a) / difference) for a, b in zip(planned, took, strict=True)]
