"""After training: the temperature of the draft that is right most often, for some temperatures of the target."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.files import write_json
from decode.drafts.contract import Draft
from decode.drafts.temperature import FITTED
from decode.laws import Law
from decode.verify import overlap
from distill.batches import collate
from distill.rows import Row
from distill.teacher import Teacher

TARGET_TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.3)
RATIOS = tuple(0.5 + 0.05 * i for i in range(23))  # the draft's temperature ÷ the target's, 0.5 to 1.6
PLACES = 32  # of a row, evenly spread: neighbours tell little that is new


@torch.no_grad()
def fit_temperatures(
    draft: Draft[Any], teacher: Teacher, rows: Sequence[Row], law: Law, device: torch.device
) -> dict[float, float]:
    """For each of `TARGET_TEMPERATURES` the draft's temperature with the largest mean α, at up to `PLACES` places of
    each row.

    `law` is what else the answers follow (top-k, top-p).
    """
    alpha = torch.zeros(len(TARGET_TEMPERATURES), len(RATIOS), dtype=torch.float64)
    for row in rows:
        batch = collate([[row]], device)
        last, tapped = teacher.read(batch.ids, batch.predicts, taps=draft.taps)
        places = batch.predicts[0].nonzero().flatten()
        some = torch.arange(0, len(places), ceil(len(places) / PLACES), device=device)
        p_logits = nn.functional.linear(last[some], teacher.head_weight)
        q_logits = next(iter(draft.replayed(batch.ids, tapped[:, :-1], places[some], 1)))[0]
        drafted = q_logits[0].isfinite().nonzero().flatten()  # elsewhere nothing overlaps
        drafted = drafted if law.vocabulary is None else drafted[drafted < law.vocabulary]
        for i, temperature in enumerate(TARGET_TEMPERATURES):
            p = replace(law, temperature=temperature)(p_logits)[:, drafted]
            for j, ratio in enumerate(RATIOS):
                q = replace(law, temperature=temperature * ratio, vocabulary=None)(q_logits[:, drafted])
                alpha[i, j] += overlap(p, q).double().sum().cpu()
    return {t: t * RATIOS[int(alpha[i].argmax())] for i, t in enumerate(TARGET_TEMPERATURES)}


def store_temperatures(fitted: dict[float, float], folder: Path) -> None:
    """Into the draft folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["draftsmith"][FITTED] = {f"{target:g}": round(draft, 4) for target, draft in fitted.items()}
    write_json(folder / "config.json", config)
