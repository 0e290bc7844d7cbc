"""The usual logits processors, by setting: transformers' own where it has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)  # fmt: skip

from configs.errors import UserError


@dataclass(frozen=True)
class Penalties:
    """What pushes tokens up or down before temperature; the defaults are off. Names and meaning as in transformers.

    presence_penalty and frequency_penalty count generated tokens only, as serving engines do. With `answer_only` all
    do, as with transformers' encoder–decoder models.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    answer_only: bool = False

    def __post_init__(self) -> None:
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty {self.repetition_penalty}: expected more than 0 (1 is off)")
        if self.no_repeat_ngram_size < 0:
            raise UserError(f"no_repeat_ngram_size {self.no_repeat_ngram_size}: expected 0 (off) or more")
        if self.min_new_tokens < 0:
            raise UserError(f"min_new_tokens {self.min_new_tokens}: expected 0 (off) or more")

    def check_ids(self, vocabulary: int) -> None:
        """Raises UserError for a biased token id that does not exist."""
        for token in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise UserError(f"logit_bias {token}: expected a token id from 0 to {vocabulary - 1}")

    def processors(self, prompt_tokens: int, eos_ids: Sequence[int], device: torch.device) -> tuple[Any, ...]:
        """The processors of one call, in transformers' order."""
        if self.answer_only:
            alone = replace(self, answer_only=False).processors(0, eos_ids, device)
            return tuple(OfAnswer(prompt_tokens, processor) for processor in alone)
        found: list[Any] = []
        if self.logit_bias:
            found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in self.logit_bias.items()}))
        if self.repetition_penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            found.append(CountPenalty(prompt_tokens, self.presence_penalty, self.frequency_penalty))
        if self.no_repeat_ngram_size:
            found.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.bad_words_ids:
            words = [list(word) for word in self.bad_words_ids]
            found.append(NoBadWordsLogitsProcessor(words, eos_token_id=list(eos_ids) or None))
        if self.min_new_tokens and eos_ids:
            found.append(
                MinNewTokensLengthLogitsProcessor(prompt_tokens, self.min_new_tokens, list(eos_ids), device=device)
            )
        return tuple(found)


def word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word as it stands at the start of a text and after a space. Raises UserError for no tokens."""
    found: list[list[int]] = []
    for word in words:
        spellings = [list(tokenizer(text, add_special_tokens=False).input_ids) for text in (word, f" {word}")]
        if not word.strip() or not all(spellings):
            raise UserError(f"bad_word {word!r}: has no tokens; leave it out")
        found += [ids for ids in spellings if ids not in found]
    return found


class OfAnswer(LogitsProcessor):  # type: ignore[misc]
    """Shows another processor the text without its prompt."""

    def __init__(self, prompt_tokens: int, processor: Any) -> None:
        self.prompt_tokens, self.processor = prompt_tokens, processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = self.processor(input_ids[:, self.prompt_tokens :], scores)
        return found


class CountPenalty(LogitsProcessor):  # type: ignore[misc]
    """Subtract `presence` from every token generated so far and `frequency` for each time it was."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens, self.presence, self.frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts
