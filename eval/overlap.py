"""Prompts of a suite that share words with what a draft was trained on: acceptance on them is not held out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.errors import UserError
from decode.conversations import to_messages
from eval.report import Overlap
from eval.suites import Prompt

WORDS = 8


def training_overlap(prompts: Sequence[Prompt], training: Iterable[Sequence[str]]) -> Overlap:
    """Compare the suite's user turns, later ones too, with each training row's texts, case and punctuation aside."""
    seen: set[tuple[str, ...]] = set()
    rows = 0
    for texts in training:
        rows += 1
        for text in texts:
            seen |= _runs(text)
    shared = [prompt.id for prompt in prompts if any(_runs(text) & seen for text in _asked(prompt))]
    return Overlap(words=WORDS, training_rows=rows, prompts=shared)


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """The user turns and answers of a training row, or its plain text; nothing of a row that cannot be read."""
    try:
        return [str(turn["content"]) for turn in to_messages(row) if turn["role"] in ("user", "assistant")]
    except UserError:
        return [row["text"]] if isinstance(row.get("text"), str) else []


def _asked(prompt: Prompt) -> list[str]:
    own = [str(turn["content"]) for turn in prompt.messages if turn["role"] == "user"]
    return [*own, *prompt.later_turns]


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every run of `WORDS` words; a shorter text of two words or more is one run as a whole."""
    words = [kept for word in text.lower().split() if (kept := "".join(c for c in word if c.isalnum()))]
    if len(words) < WORDS:
        return {tuple(words)} if len(words) > 1 else set()
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}
