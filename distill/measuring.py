"""The in-training hook: acceptance on held-out target text, by the same replay that the report uses."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from configs.errors import UserError
from decode.drafts.lm import LMDraft
from decode.laws import Law
from decode.verify import DEFAULT_VERIFIER
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher, last_hidden
from eval.replay import Replay, expected_rounds, replay_text


def acceptance_hook(
    draft: Any,
    teacher: Teacher,
    rows: list[Row],
    law: Law,
    num_draft_tokens: int,
    eos_ids: tuple[int, ...],
    accelerator: Any,
) -> Callable[[], dict[str, float]]:
    """A function that gives alpha and tau of `draft` over `rows`; every process takes its share of them.

    tau is for `num_draft_tokens` drafted per round, under the law that the rows were sampled with and the verifier
    that decoding uses by default.
    """
    if not any(_predicted_after_the_first(row) for row in rows):
        raise UserError("no held-out answer has two tokens, so acceptance cannot be measured; raise data.held_out_rows")
    share = rows[accelerator.process_index :: accelerator.num_processes]

    def measure() -> dict[str, float]:
        draft.eval()
        texts = [
            text
            for row in share
            for text in _replay_row(
                draft, teacher, row, law.greedy() if row.greedy else law, eos_ids, accelerator.device
            )
        ]
        sums = torch.tensor(
            [
                float(sum(sum(text.overlap) for text in texts)),
                float(sum(len(text) for text in texts)),
                float(sum(sum(expected_rounds(text, num_draft_tokens, DEFAULT_VERIFIER)) for text in texts)),
            ],
            dtype=torch.float64,
            device=accelerator.device,
        )
        overlap, tokens, rounds = accelerator.reduce(sums, reduction="sum").tolist()
        return {"alpha": overlap / tokens, "tau": tokens / rounds}

    return measure


def _predicted_after_the_first(row: Row) -> bool:
    """Whether some answer has a token after its first, which is the one that prefill gives."""
    return any(a and b for a, b in pairwise(row.is_answer[1:]))


@torch.no_grad()
def _replay_row(
    draft: Any, teacher: Teacher, row: Row, law: Law, eos_ids: tuple[int, ...], device: torch.device
) -> list[Replay]:
    """One replay for each answer of the chat: a round never reaches from one answer into the next."""
    batch = collate([[row]], device)
    head, align = draft.get_output_embeddings(), LMDraft(draft, teacher.head_weight.shape[0]).align
    p = law(nn.functional.linear(teacher.hidden(batch.ids, batch.predicts), teacher.head_weight))
    q = law(align(head(last_hidden(draft, batch.ids)[batch.predicts])))
    places = batch.predicts[0].nonzero().flatten()
    emitted = batch.ids[0, places + 1]
    ends = [*((places.diff() > 1).nonzero().flatten() + 1).tolist(), len(places)]
    starts = [0, *ends[:-1]]
    return [
        replay_text(p[a:b], q[a:b], emitted[a:b], ended=int(emitted[b - 1]) in eos_ids)
        for a, b in zip(starts, ends, strict=True)
    ]
