"""After training: the temperature of the draft that is right most often, for some temperatures of the target."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def fit_temperatures(
    draft: Draft[Any], teacher: Teacher, rows: Sequence[Row], law: Law, device: torch.device
) -> dict[float, float]:
    """For each of `TARGET_TEMPERATURES` the draft's temperature with the largest mean α at the rows' places.

    `law` is what else the answers follow (top-k, top-p).
    """
    alpha = torch.zeros(len(TARGET_TEMPERATURES), len(RATIOS), dtype=torch.float64)
    for row in rows:
        batch = collate([[row]], device)
        last, tapped = teacher.read(batch.ids, batch.predicts, taps=draft.taps)
        p_logits = nn.functional.linear(last, teacher.head_weight)
        places = batch.predicts[0].nonzero().flatten()
        q_logits = next(iter(draft.replayed(batch.ids, tapped[:, :-1], places, 1)))[0]
        for i, temperature in enumerate(TARGET_TEMPERATURES):
            p = _at(law, temperature)(p_logits)
            for j, ratio in enumerate(RATIOS):
                alpha[i, j] += _overlap(p, _at(law, temperature * ratio)(q_logits))
    return {t: t * RATIOS[int(alpha[i].argmax())] for i, t in enumerate(TARGET_TEMPERATURES)}


def store_temperatures(fitted: dict[float, float], folder: Path) -> None:
    """Into the draft folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["draftsmith"][FITTED] = {f"{target:g}": round(draft, 4) for target, draft in fitted.items()}
    write_json(folder / "config.json", config)


def _at(law: Law, temperature: float) -> Law:
    return Law(temperature, law.top_k, law.top_p, vocabulary=law.vocabulary)


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    return overlap(p, q).double().sum().cpu()
