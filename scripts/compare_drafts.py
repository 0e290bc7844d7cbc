#!/usr/bin/env python3
"""Acceptance of several drafts on the same held-out rows, with paired intervals against the first one.

usage: scripts/compare_drafts.py CONFIG NAME=DRAFT[,DRAFT...]...     (the answers of CONFIG must be there)

Several folders under one name are seeds of one recipe: their sums are added up row by row. For rows sampled at T = 1
and for greedy ones it prints α by drafted position, τ and their difference to the first name, with 95 % intervals:
a bootstrap over rows, which are the prompts. The last line is one JSON object.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configs.reader import read_config  # noqa: E402
from decode.drafts.kinds import load_draft  # noqa: E402
from decode.models import load_model  # noqa: E402
from decode.verify import DEFAULT_VERIFIER  # noqa: E402
from distill.answers import with_template  # noqa: E402
from distill.job import read_data  # noqa: E402
from distill.job_settings import JobSettings  # noqa: E402
from distill.measuring import replay_row  # noqa: E402
from distill.rows import split_held_out  # noqa: E402
from distill.teacher import Teacher  # noqa: E402
from eval.replay import expected_rounds, overlaps  # noqa: E402

RESAMPLES, POSITIONS = 2000, 5


def sums_of(draft, teacher, row, law, eos_ids, gamma) -> list[float]:
    """Of one row: Σα and places for each drafted position, tokens, expected rounds of γ."""
    texts = replay_row(draft, teacher, row, law, eos_ids, torch.device("cpu"), max(gamma, POSITIONS))
    found = []
    for j in range(POSITIONS):
        values = overlaps(texts, j)
        found += [sum(values), len(values)]
    rounds = sum(sum(expected_rounds(text, gamma, DEFAULT_VERIFIER)) for text in texts)
    return [*found, sum(map(len, texts)), rounds]


def ratios(sums: np.ndarray) -> np.ndarray:
    """α_1..α_5 and τ of summed columns [..., 12] -> [..., 6]."""
    return sums[..., 0::2] / np.maximum(sums[..., 1::2], 1e-9)


def interval(values: np.ndarray) -> list[float]:
    return [round(float(np.quantile(values, share)), 4) for share in (0.025, 0.975)]


def main() -> None:
    config, *named = sys.argv[1:]
    settings = read_config(JobSettings, Path(config))
    target = with_template(load_model(settings.target, "float32"), settings.data)
    held_out = split_held_out(read_data(settings, target), settings.data.held_out_rows, settings.data.held_out_seed)[1]
    law, gamma, teacher = settings.data.law, settings.measure_num_draft_tokens, Teacher(target.model)
    result = {}
    for kind in ("T=1", "greedy"):
        rows = [row for row in held_out if row.greedy == (kind == "greedy")]
        if not rows:
            continue
        picks = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
        table = Table(
            *["draft", *(f"α_{j}" for j in range(1, POSITIONS + 1)), f"τ, γ = {gamma}", "Δα_1", "Δτ"], title=kind
        )
        first = None
        for name, folders in (part.split("=", 1) for part in named):
            drafts = [load_draft(target, folder, "float32") for folder in folders.split(",")]
            its_law = law.greedy() if kind == "greedy" else law
            sums = np.array(
                [
                    np.sum([sums_of(draft, teacher, row, its_law, target.eos_ids, gamma) for draft in drafts], axis=0)
                    for row in track(rows, f"{kind} {name}")
                ]
            )
            whole, resampled = ratios(sums.sum(0)), ratios(sums[picks].sum(1))
            first = resampled if first is None else first
            difference = resampled - first
            of_alpha, of_tau = interval(difference[:, 0]), interval(difference[:, -1])
            table.add_row(name, *(f"{value:.3f}" for value in whole), str(of_alpha), str(of_tau))
            result.setdefault(kind, {})[name] = {
                "alpha": [round(float(value), 4) for value in whole[:-1]], "tau": round(float(whole[-1]), 4),
                "alpha_1_interval": interval(resampled[:, 0]), "tau_interval": interval(resampled[:, -1]),
                "alpha_1_minus_first": of_alpha, "tau_minus_first": of_tau, "rows": len(rows), "seeds": len(drafts),
            }  # fmt: skip
        Console(width=140).print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
