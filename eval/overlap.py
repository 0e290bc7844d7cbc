"""Prompts of a suite that share words with what a draft was trained on: acceptance on them is not held out."""

from collections.abc import Iterable, Sequence

from decode.conversations import Message
from eval.report import Overlap
from eval.suites import Prompt

WORDS = 8


def training_overlap(prompts: Sequence[Prompt], training: Iterable[Sequence[Message]]) -> Overlap:
    """Compare the user turns of the suite with every turn of the training chats, case and punctuation aside."""
    seen: set[tuple[str, ...]] = set()
    rows = 0
    for messages in training:
        rows += 1
        for turn in messages:
            seen |= _runs(str(turn["content"]))
    shared = [prompt.id for prompt in prompts if any(_runs(str(turn["content"])) & seen for turn in prompt.messages)]
    return Overlap(words=WORDS, training_rows=rows, prompts=shared)


def _runs(text: str) -> set[tuple[str, ...]]:
    """Every run of `WORDS` words; a shorter text is one run as a whole."""
    words = ["".join(c for c in word if c.isalnum()) for word in text.lower().split()]
    if len(words) < WORDS:
        return {tuple(words)}
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}
