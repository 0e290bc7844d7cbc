"""The in-training hook: acceptance on held-out target text, by the same replay that the report uses."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.laws import Law
from decode.length import Costs
from decode.verify import DEFAULT_VERIFIER
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher
from eval.replay import Replay, expected_rounds, overlaps, replay_text
from eval.stats import interval, resampled
from train.hook import Evidence, Measured

SAMPLES, SAMPLE_TOKENS = 2, 64


class AcceptanceHook:
    """Gives alpha and tau of a draft over held-out rows; every process takes its share of them.

    alpha is that of a round's first drafted token; alpha_2, ... of the later ones, for a draft whose law differs. tau
    is for `num_draft_tokens` drafted per round, under the law that a row was sampled with and the verifier that
    decoding uses by default. With `costs`, a frozen latency profile, also the speed-up that it predicts at the best γ,
    which is then the score; else tau is. `refresh`
    brings the draft up to what has been trained, on every process. Raises UserError where no row can tell.
    """

    def __init__(
        self, draft: Draft[Any], teacher: Teacher, rows: list[Row], law: Law, num_draft_tokens: int,
        eos_ids: tuple[int, ...], accelerator: Any, tokenizer: Any = None, costs: Costs | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        if not any(_predicted_after_the_first(row) for row in rows):
            raise UserError(
                "no held-out answer has two tokens, so acceptance cannot be measured; raise data.held_out_rows"
            )
        self._draft, self._teacher, self._rows, self._law, self._eos_ids = draft, teacher, rows, law, eos_ids
        self._accelerator, self._tokenizer, self._costs = accelerator, tokenizer, costs
        self._refresh = refresh
        self._gamma = num_draft_tokens
        self._positions = num_draft_tokens if draft.taps else 1
        self._lengths = [num_draft_tokens] if costs is None else list(range(1, max(costs.v)))
        self._longest = max(num_draft_tokens, *self._lengths)
        self.score = "tau" if costs is None else "speedup"

    def measure(self) -> Measured:
        """Evidence: of each row its tokens, and the expected rounds of each γ."""
        if self._refresh:
            self._refresh()
        self._draft.model.eval()
        # One line a row; the processes' lines are added up.
        columns = 2 + len(self._lengths) + 2 * self._positions
        found = torch.zeros(len(self._rows), columns, dtype=torch.float64)
        samples: dict[str, str] = {}
        accelerator = self._accelerator
        for number in range(accelerator.process_index, len(self._rows), accelerator.num_processes):
            row = self._rows[number]
            texts = self._replay(row)
            found[number] = torch.tensor(self._figures(texts), dtype=torch.float64)
            if self._tokenizer is not None and len(samples) < SAMPLES:
                samples[f"sample_{number}"] = self._marked(row, texts)
        self._teacher.finish()
        table = accelerator.reduce(found.to(accelerator.device), reduction="sum").cpu().numpy()
        tokens, rounds_of_gamma, rounds, acceptance = np.split(table, [1, 2, 2 + len(self._lengths)], axis=1)
        sums = acceptance.sum(0)
        alphas = [float(top / max(1.0, bottom)) for top, bottom in zip(sums[0::2], sums[1::2], strict=True)]
        values = {"alpha": alphas[0]}
        values |= {f"alpha_{number}": alpha for number, alpha in enumerate(alphas[1:], start=2)}
        values["tau"] = float(tokens.sum() / max(1e-9, rounds_of_gamma.sum()))
        evidence = np.concatenate([tokens, rounds], axis=1)
        if self._costs is not None:
            values["speedup"] = float(self._scores(evidence.sum(0, keepdims=True))[0])
        return Measured(values, samples, evidence.tolist())

    def still_rises(self, before: Evidence, now: Evidence) -> bool:
        """Whether the score has risen: the 95 % interval of its difference over the same rows lies above 0."""
        columns = np.concatenate([np.array(before), np.array(now)], axis=1)
        sums = resampled(columns)
        assert sums is not None, "the job has seen to enough rows"
        old, new = np.split(sums, 2, axis=1)
        return interval(self._scores(new) - self._scores(old))[0] > 0

    def _scores(self, sums: np.ndarray) -> np.ndarray:
        """Of summed evidence [n, 1 + lengths]: τ ÷ the cost of a round, at the best γ -> [n]."""
        costs = [1.0 if self._costs is None else self._costs.round_cost(gamma, 1) for gamma in self._lengths]
        best: np.ndarray = (sums[:, :1] / np.maximum(sums[:, 1:], 1e-9) / np.array(costs)).max(axis=1)
        return best

    def _replay(self, row: Row) -> list[Replay]:
        law = self._law.greedy() if row.greedy else self._law
        return replay_row(self._draft, self._teacher, row, law, self._eos_ids, self._accelerator.device, self._longest)

    def _figures(self, texts: Sequence[Replay]) -> list[float]:
        rounds = {
            gamma: sum(sum(expected_rounds(text, gamma, DEFAULT_VERIFIER)) for text in texts)
            for gamma in {self._gamma, *self._lengths}
        }
        found = [overlaps(texts, j) for j in range(self._positions)]
        acceptance = [value for values in found for value in (sum(values), float(len(values)))]
        return [float(sum(map(len, texts))), rounds[self._gamma], *(rounds[g] for g in self._lengths), *acceptance]

    def _marked(self, row: Row, texts: Sequence[Replay]) -> str:
        """The start of a row's first answer, with what the draft would more likely get rejected in brackets."""
        first = row.is_answer.index(True, 1) + 1  # prefill gives the answer's first token
        chances = texts[0].number(0).overlap[:SAMPLE_TOKENS]
        pieces = [self._tokenizer.decode(row.ids[first - 1])]
        for token, chance in zip(row.ids[first : first + len(chances)], chances, strict=True):
            piece = self._tokenizer.decode(token)
            pieces.append(piece if chance >= 0.5 else f"[{piece}]")
        return "".join(pieces)


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
