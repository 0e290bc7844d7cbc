"""The in-training hook: acceptance on held-out target text, by the same replay that the report uses."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.laws import Law
from decode.verify import DEFAULT_VERIFIER
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher
from eval.replay import Replay, expected_rounds, overlaps, replay_text


def acceptance_hook(
    draft: Draft[Any], teacher: Teacher, rows: list[Row], law: Law, num_draft_tokens: int, eos_ids: tuple[int, ...],
    accelerator: Any,
) -> Callable[[], dict[str, float]]:  # fmt: skip
    """A function that gives alpha and tau of `draft` over `rows`; every process takes its share of them.

    alpha is that of a round's first drafted token; alpha_2, ... of the later ones, for a draft whose law differs. tau
    is for `num_draft_tokens` drafted per round, under the law that a row was sampled with and the verifier that
    decoding uses by default.
    """
    if not any(_predicted_after_the_first(row) for row in rows):
        raise UserError("no held-out answer has two tokens, so acceptance cannot be measured; raise data.held_out_rows")
    share = rows[accelerator.process_index :: accelerator.num_processes]
    numbers = range(num_draft_tokens if draft.taps else 1)

    def measure() -> dict[str, float]:
        draft.model.eval()
        texts: list[Replay] = []
        for row in share:
            its_law = law.greedy() if row.greedy else law
            texts += replay_row(draft, teacher, row, its_law, eos_ids, accelerator.device, num_draft_tokens)
        rounds = sum(sum(expected_rounds(text, num_draft_tokens, DEFAULT_VERIFIER)) for text in texts)
        found = [overlaps(texts, j) for j in numbers]
        sums = [(sum(map(len, texts)), rounds), *((sum(values), len(values)) for values in found)]
        whole = accelerator.reduce(torch.tensor(sums, dtype=torch.float64, device=accelerator.device), reduction="sum")
        tau, *alphas = [top / max(1.0, bottom) for top, bottom in whole.tolist()]
        later = {f"alpha_{number}": alpha for number, alpha in enumerate(alphas[1:], start=2)}
        return {"alpha": alphas[0], **later, "tau": tau}

    return measure


def _predicted_after_the_first(row: Row) -> bool:
    """Whether some answer has a token after its first, which is the one that prefill gives."""
    return any(a and b for a, b in pairwise(row.is_answer[1:]))


@torch.no_grad()
def replay_row(
    draft: Draft[Any], teacher: Teacher, row: Row, law: Law, eos_ids: tuple[int, ...], device: torch.device, steps: int
) -> list[Replay]:
    """One replay for each answer of the chat: a round never reaches from one answer into the next."""
    batch = collate([[row]], device)
    last, tapped = teacher.read(batch.ids, batch.predicts, taps=draft.taps)
    p = law(nn.functional.linear(last, teacher.head_weight))
    places = batch.predicts[0].nonzero().flatten()
    q = [law(logits[0]) for logits in draft.replayed(batch.ids, tapped[:, :-1], places, steps)]
    emitted = batch.ids[0, places + 1]
    ends = [*((places.diff() > 1).nonzero().flatten() + 1).tolist(), len(places)]
    starts = [0, *ends[:-1]]
    return [
        replay_text(p[a:b], [law[a:b] for law in q], emitted[a:b], ended=int(emitted[b - 1]) in eos_ids)
        for a, b in zip(starts, ends, strict=True)
    ]
