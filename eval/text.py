"""Token ids of answers: where two of them part, and how repetitive one is, since loops accept anything."""

from collections.abc import Sequence


def repeated_places(tokens: Sequence[int], n: int = 8) -> set[int]:
    """Places of a text that lie in an n-gram that has occurred before in it."""
    seen: set[tuple[int, ...]] = set()
    repeated: set[int] = set()
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        if gram in seen:
            repeated.update(range(end - n, end))
        seen.add(gram)
    return repeated


def repeated_tokens(tokens: Sequence[int], n: int = 8) -> int:
    """How many tokens of a text lie in an n-gram that has occurred before in it."""
    return len(repeated_places(tokens, n))


def repeated_share(texts: Sequence[Sequence[int]], n: int = 8) -> float:
    """Share of all tokens that lie in an n-gram repeated within their own text."""
    total = sum(len(text) for text in texts)
    return sum(repeated_tokens(text, n) for text in texts) / total if total else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None when equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))
