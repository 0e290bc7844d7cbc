"""Which ids a draft's head keeps, and what the cut costs.

Shapes: V the target's vocabulary, V_d ids kept.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import UserError
from decode.laws import Law
from decode.models import Loaded
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher


def count_tokens(rows: Sequence[Row], vocabulary: int) -> Tensor:
    """How often each id is supervised [V]."""
    ids = [token for row in rows for token, mark in zip(row.ids[1:], row.is_answer[1:], strict=True) if mark]
    return torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocabulary)


def choose_ids(counts: Tensor, size: int, always: Collection[int], tokens: int) -> Tensor:
    """The `size` most frequent ids, in ascending order; of equally frequent ones the lowest. [V_d].

    `always` (end and special tokens) is kept whatever its count. With fewer different ids than `size` the rest is
    filled up with the lowest unseen ids below `tokens`, the length of the tokenizer.
    Raises UserError for a size that the tokenizer cannot fill or that is too small for `always`.
    """
    if not len(always) <= size <= tokens:
        raise UserError(f"draft.vocabulary {size}: expected {len(always)} (always kept) to {tokens} (the tokenizer's)")
    ranked = counts[:tokens].clone()
    ranked[list(always)] = int(counts.max()) + 1
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def kept_always(target: Loaded, counts: Tensor) -> set[int]:
    """The target's end tokens, and every special token that its text contains."""
    special = (token for token, added in target.tokenizer.added_tokens_decoder.items() if added.special)
    return set(target.eos_ids) | {token for token in special if counts[token] > 0}


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of counted tokens that lie in the cut."""
    return float(counts[ids].sum() / counts.sum().clamp(min=1))


@dataclass(frozen=True)
class Ceiling:
    """What a cut leaves to a draft on held-out target text, as a bound on α: when sampling the mean mass of p inside
    it, when greedy the share of places whose best token is inside; and the share of the text's own tokens."""

    size: int
    coverage: float
    alpha_sampled: float
    alpha_greedy: float


@torch.no_grad()
def ceilings(
    teacher: Teacher, rows: Sequence[Row], cuts: Sequence[Tensor], device: torch.device, law: Law
) -> list[Ceiling]:
    """One `Ceiling` for each cut, over the supervised places of `rows`; `law` is that of sampling."""
    inside = torch.zeros(len(cuts), 3, dtype=torch.float64)
    places = 0
    for row in rows:
        batch = collate([[row]], device)
        logits = (teacher.hidden(batch.ids, batch.predicts) @ teacher.head_weight.T).float()
        p, best = law(logits), logits.argmax(-1)
        own = batch.ids[0, 1:][batch.predicts[0, :-1]]
        places += len(own)
        for number, ids in enumerate(cuts):
            kept = torch.zeros(p.shape[-1], dtype=torch.bool, device=device)
            kept[ids.to(device)] = True
            found = kept[own].sum(), p[:, kept].sum(), kept[best].sum()
            inside[number] += torch.stack([value.double().cpu() for value in found])
    return [Ceiling(len(ids), *(inside[number] / places).tolist()) for number, ids in enumerate(cuts)]
