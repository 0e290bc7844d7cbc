"""The in-training hook: acceptance on held-out target text, by the same replay that the report uses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from decode.laws import Law
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher, last_hidden
from eval.replay import Replay, expected_rounds, replay_text


def acceptance_hook(
    draft: Any, teacher: Teacher, rows: list[Row], law: Law, num_draft_tokens: int, accelerator: Any
) -> Callable[[], dict[str, float]]:
    """A function that gives alpha and tau of `draft` over `rows`; every process takes its share of them.

    tau is for `num_draft_tokens` drafted per round, under the law that the rows were sampled with.
    """
    share = rows[accelerator.process_index :: accelerator.num_processes]

    def measure() -> dict[str, float]:
        draft.eval()
        texts = [_replay_row(draft, teacher, row, law, accelerator.device) for row in share]
        sums = torch.tensor(
            [
                float(sum(sum(text.overlap) for text in texts)),
                float(sum(len(text.accept) for text in texts)),
                float(sum(sum(expected_rounds(text.accept, num_draft_tokens)) for text in texts)),
            ],
            dtype=torch.float64,
            device=accelerator.device,
        )
        overlap, tokens, rounds = accelerator.reduce(sums, reduction="sum").tolist()
        return {"alpha": overlap / tokens, "tau": tokens / rounds}

    return measure


@torch.no_grad()
def _replay_row(draft: Any, teacher: Teacher, row: Row, law: Law, device: torch.device) -> Replay:
    batch = collate([row], device)
    head = draft.get_output_embeddings()
    p = law(nn.functional.linear(teacher.hidden(batch.ids, batch.predicts), teacher.head_weight))
    q = law(head(last_hidden(draft, batch.ids)[batch.predicts]))
    emitted = batch.ids[:, 1:][batch.predicts[:, :-1]]
    return replay_text(p, q, emitted)
