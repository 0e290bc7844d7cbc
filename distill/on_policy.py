"""Rows whose answers are rolled out while the draft trains, by the draft or by the pair, for the target to score."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field

from configs.settings import StrictSettings
from decode.drafts.contract import Draft
from decode.draws import SeededDraws
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.stops import Stops
from distill.rows import Row


class OnPolicySettings(StrictSettings):
    """Training on the draft's own text (GKD, Agarwal et al. 2024), and on the places where it was rejected."""

    fraction: float = Field(0.0, ge=0, le=1, description="λ: share of rows whose answer is rolled out anew; 0 is off.")
    by: Literal["draft", "pair"] = Field("draft", description="draft: its own text; pair: the target's, speculating.")
    max_new_tokens: int = Field(64, ge=1, description="Tokens of a rolled-out answer at most.")
    num_draft_tokens: int = Field(3, ge=1, description="pair: γ while rolling out.")
    error_weight: float = Field(1.0, gt=0, description="pair: weight of places where the target rejected the draft.")


class OnPolicy:
    """Rolls out a new answer to the first prompt of some rows: which ones, and their draws, only (seed, step, row) say.

    The draft's weights are those of the moment, so a resumed run goes on as the uninterrupted one would have. `refresh`
    brings them up to what has been trained; `finish` waits, still in step, for processes whose answers are longer.
    """

    def __init__(
        self, settings: OnPolicySettings, draft: Draft[Any], target: Any, law: Law, eos_ids: tuple[int, ...], seed: int,
        refresh: Callable[[], None] = lambda: None, finish: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._settings, self._draft, self._target = settings, draft, target
        self._law, self._eos_ids, self._seed = law, eos_ids, seed
        self._refresh, self._finish = refresh, finish

    def rewrite_all(self, step: int, sequences: Sequence[Sequence[Row]]) -> list[Sequence[Row]]:
        """Each row of a process's sequences through `rewrite`. Every process calls this."""
        self._refresh()
        rewritten: list[Sequence[Row]] = [[self.rewrite(step, row) for row in rows] for rows in sequences]
        self._finish()
        return rewritten

    def rewrite(self, step: int, row: Row) -> Row:
        """The row itself, or with probability λ its prompt with a new answer."""
        seed = (self._seed * 1_000_003 + step) * 1_000_003 + row.number
        if torch.rand((), generator=torch.Generator().manual_seed(seed % 2**63)) >= self._settings.fraction:
            return row
        prompt = row.ids[: row.is_answer.index(True)]
        if not prompt:
            return row  # plain text has no prompt to answer
        self._draft.model.eval()
        answer, weights = (self._by_draft if self._settings.by == "draft" else self._by_pair)(prompt, seed % 2**31)
        marks = [False] * len(prompt) + [True] * len(answer)
        return Row(prompt + answer, marks, row.number, [1.0] * len(prompt) + weights)

    @torch.no_grad()
    def _by_draft(self, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
        device = self._target.device
        state = self._draft.start(torch.tensor([prompt], device=device), None)
        count = min(self._settings.max_new_tokens, self._draft.context_tokens - len(prompt))
        drafted = self._draft.propose(state, count, self._law, SeededDraws(seed, device)).tokens[0].tolist()
        end = next((i + 1 for i, token in enumerate(drafted) if token in self._eos_ids), len(drafted))
        return drafted[:end], [1.0] * end

    def _by_pair(self, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
        settings = Settings(
            self._law, self._settings.max_new_tokens, self._settings.num_draft_tokens, Stops(self._eos_ids), seed
        )
        answer = generate_ids(self._target, self._draft, prompt, settings)
        weights = [1.0]  # the first token is prefill's
        for done in answer.rounds:
            rejected = done.accepted < done.reached
            weights += [1.0] * done.accepted
            if len(done.tokens) > done.accepted:
                weights.append(self._settings.error_weight if rejected else 1.0)
        return answer.token_ids, weights
