"""User turns that the target writes itself, so that distilling needs no data set."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode.chat import encode_text, user_turn, user_turn_opening
from decode.laws import Law
from decode.models import Loaded
from distill.claims import claim_file
from distill.row_file import fill_file
from eval.suites import Prompt, read_prompts

# (prompt ids, law, answer tokens at most, seed, numbers of the rows) -> answer ids
Sampler = Callable[[Sequence[Sequence[int]], Law, int, int, Sequence[int]], list[list[int]]]

EXAMPLES = 2
TURN_TOKENS = 96
LAW = Law(1.0, top_p=0.95)


def write_prompts(
    target: Loaded, path: Path, count: int, examples: Sequence[Prompt], sampled_by: Sampler, batch_rows: int, seed: int,
    claim: dict[str, Any],
) -> list[Prompt]:  # fmt: skip
    """`count` user turns in the file `path`, which is gone on with or read back.

    Without `examples` each is what the target writes where its template opens a first user turn (Magpie, Xu et al.
    2024), up to the end of the line. With examples it is what follows two of them from one category, and each category
    gets equally many turns (Self-Instruct, Wang et al. 2023); it is kept whole, or its first line where `TURN_TOKENS`
    do not hold it. Raises UserError for a file of another run: of another target, seed, number, or `claim`.
    """
    claim_file(path, target, {"self_prompts": count, "batch_rows": batch_rows, "seed": seed} | claim)
    ids = [f"self-{number:06d}" for number in range(count)]
    by_category: dict[str, list[str]] = defaultdict(list)
    for example in examples:
        by_category[example.category] += [str(turn["content"]) for turn in example.messages if turn["role"] == "user"]
    categories = sorted(by_category) or ["all"]

    def write(batch: Sequence[int]) -> list[dict[str, Any]]:
        chosen = [categories[i * len(categories) // count] for i in batch]  # alike in length, so little is padding
        before = [
            _before(target, by_category[category], f"{seed} {i}") for i, category in zip(batch, chosen, strict=True)
        ]
        turns = sampled_by(before, LAW, TURN_TOKENS, seed + 7919, batch)
        return [
            {"id": ids[i], "category": category, "prompt": _text(target, turn, whole=bool(examples))}
            for i, category, turn in zip(batch, chosen, turns, strict=True)
        ]

    fill_file(path, ids, batch_rows, write, "prompts", alone="answered_by" in claim)
    return read_prompts(path)


def _before(target: Loaded, examples: Sequence[str], seed: str) -> list[int]:
    """Token ids of two examples, as far as the context holds them, and of an open user turn."""
    chosen = random.Random(seed).sample(examples, min(EXAMPLES, len(examples)))
    turns = [user_turn(target.tokenizer, text, target.template_arguments) for text in chosen]
    opening = user_turn_opening(target.tokenizer, target.template_arguments)
    room = target.context_tokens - TURN_TOKENS
    while len(ids := encode_text(target.tokenizer, "".join([*turns, opening]))) > room and turns:
        turns.pop()
    return ids


def _text(target: Loaded, turn: list[int], whole: bool) -> str:
    text = str(target.tokenizer.decode(turn, skip_special_tokens=True)).strip()
    ended = bool(turn) and turn[-1] in target.eos_ids
    return (text if whole and ended else text.split("\n")[0]) or "Hello."
