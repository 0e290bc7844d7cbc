#!/usr/bin/env python3
"""Where a round of the decoder spends its time: the single pieces behind the figures of docs/results.md.

usage: scripts/profile_decode.py        (needs `make setup`; about a minute on an idle machine)

bfloat16, as many threads as torch takes. Prints a table of medians in milliseconds and, as its last line, one JSON
object of them.
"""

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from decode.kv import Reader  # noqa: E402
from decode.laws import Law  # noqa: E402
from decode.models import load_model  # noqa: E402
from distill.build import build_lm_draft  # noqa: E402

TARGET = ROOT / "models" / "smollm2-135m-instruct"
PROMPT_TOKENS = 100


def milliseconds(work, repeats: int = 40) -> float:
    times = []
    for _ in range(repeats):
        began = perf_counter()
        work()
        times.append(1000 * (perf_counter() - began))
    return median(times)


def reading(reader: Reader, ids, count: int):
    """Reads `count` tokens after the prompt, and forgets them."""

    def work():
        reader.read(ids[:, :count], keep=1)
        reader.rewind(PROMPT_TOKENS)

    return work


def linears(model, rows: int):
    """Every product of the layers, the head left out."""
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    inputs = [torch.randn(1, rows, m.in_features, dtype=m.weight.dtype) for m in layers]

    def work():
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return work


def peaked_logits(vocabulary: int) -> torch.Tensor:
    """A law whose nucleus has a few dozen tokens, as a language model's has."""
    logits = 4 * torch.randn(1, 1, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[..., :2], logits[..., 100:140] = 25.0, 20.0
    return logits


def full_sort(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Top-p as a sort of the whole vocabulary: what `Law` avoids."""
    ordered, order = logits.sort(dim=-1, descending=True)
    mass = ordered.softmax(-1).cumsum(-1)
    outside = mass - ordered.softmax(-1) >= top_p
    return logits.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf).softmax(-1)


@torch.no_grad()
def main() -> None:
    target = load_model(str(TARGET)).model
    draft = build_lm_draft(target, (0, -1)).to(target.dtype).eval().requires_grad_(False)
    ids = torch.randint(5, 1000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    readers = {"target": Reader(target), "draft": Reader(draft)}
    for reader in readers.values():
        reader.read(ids, keep=1)
    head, width = draft.get_output_embeddings(), draft.config.hidden_size
    hidden, logits = torch.randn(1, 2, width, dtype=target.dtype), peaked_logits(target.config.vocab_size)
    found = {
        "last row's logits, by slice": milliseconds(lambda: head(hidden[:, -1:])),
        "last row's logits, by index": milliseconds(lambda: head(hidden[:, torch.tensor([1])])),
        "target step": milliseconds(reading(readers["target"], ids, 1)),
        "draft step": milliseconds(reading(readers["draft"], ids, 1)),
        "draft step that reads two tokens": milliseconds(reading(readers["draft"], ids, 2)),
        "of a draft step: the head": milliseconds(lambda: head(hidden[:, :1].clone().view(1, 1, width))),
        "of a draft step: the layers' products": milliseconds(linears(draft, 1)),
        "top-p by a full sort": milliseconds(lambda: full_sort(logits, 0.9)),
        "top-p as Law does it": milliseconds(lambda: Law(1.0, top_p=0.9)(logits)),
    }
    table = Table("piece", "ms", title=f"{target.dtype}, {torch.get_num_threads()} threads")
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
