"""Where an answer ends: judged token by token, so that nothing is counted or returned after the stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.errors import UserError


@dataclass(frozen=True)
class Stops:
    """The ends of an answer: end-of-answer ids, strings, and transformers StoppingCriteria."""

    eos_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self) -> None:
        if any(not string for string in self.strings):
            raise UserError("an empty stop string would stop everything; leave it out")


class StopWatch:
    """Watches one answer grow. `limit` is how many tokens it may have; `reason` says why it ended, '' before."""

    def __init__(self, stops: Stops, prompt_ids: Sequence[int], limit: int, limit_reason: str, tokenizer: Any) -> None:
        if stops.strings and tokenizer is None:
            raise UserError("stop strings need the tokenizer: pass tokenizer=...")
        self._stops, self._tokenizer = stops, tokenizer
        self._prompt_ids = list(prompt_ids)
        self._limit, self._limit_reason = limit, limit_reason
        self._answer: list[int] = []
        # A string of n characters has at most 4n bytes, and a token at least one.
        self._tail = 4 * max(map(len, stops.strings), default=0) + 4
        self.reason = ""

    @property
    def left(self) -> int:
        """Tokens that the answer may still get."""
        return self._limit - len(self._answer)

    def keep(self, new_tokens: Sequence[int]) -> int:
        """Take new tokens one by one up to the end of the answer; returns how many were taken."""
        for count, token in enumerate(new_tokens, start=1):
            self._answer.append(token)
            self.reason = self._reason()
            if self.reason:
                return count
        return len(new_tokens)

    def _reason(self) -> str:
        if self._answer[-1] in self._stops.eos_ids:
            return "eos"
        if self._stops.strings:
            text = self._tokenizer.decode(self._answer[-self._tail :])
            if any(string in text for string in self._stops.strings):
                return "stop_string"
        if self._stops.criteria:
            ids = torch.tensor([self._prompt_ids + self._answer])
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._stops.criteria):
                return "criterion"
        return self._limit_reason if self.left <= 0 else ""


def cut_text(text: str, strings: Sequence[str]) -> str:
    """The text up to the end of the first stop string in it; all of it when there is none."""
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return text[: min(ends)] if ends else text
