"""A few answers, token by token: what was drafted, what of it was kept, and how likely both models held it."""

from collections.abc import Sequence
from typing import Any

from eval.live import PromptRun
from eval.report import Piece, Sample

MOST = 8


def samples(runs: Sequence[PromptRun], tokenizer: Any) -> list[Sample]:
    """One run of each category, the first `MOST` categories."""
    by_category: dict[str, PromptRun] = {}
    for run in runs:
        by_category.setdefault(run.prompt.category, run)
    return [
        Sample(
            id=run.prompt.id,
            category=category,
            prompt=str(run.prompt.messages[-1]["content"]) if run.prompt.messages else "",
            pieces=_pieces(run, tokenizer),
        )
        for category, run in list(by_category.items())[:MOST]
    ]


def _pieces(run: PromptRun, tokenizer: Any) -> list[Piece]:
    """Accepted tokens and the target's own make up the answer; of a rejected chain only the first is shown."""

    def text(token: int) -> str:
        return str(tokenizer.decode([token]))

    pieces = [Piece(text=text(run.trace.token_ids[0]), kind="prefill")]
    for done in run.trace.rounds:
        for j, token in enumerate(done.drafted[: done.reached]):
            kind = "accepted" if j < done.accepted else "rejected"
            pieces.append(Piece(text=text(token), kind=kind, p=done.p[j], q=done.q[j]))
        pieces += [Piece(text=text(token), kind="own") for token in done.tokens[done.accepted :]]
    return pieces
