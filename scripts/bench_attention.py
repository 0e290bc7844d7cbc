#!/usr/bin/env python
"""How long a plain step and a verification of three tokens take after texts of several lengths, with transformers' own
attention (sdpa) and with ours for few queries (decode/attention.py), in turn in one run. The last line is JSON."""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decode.attention import NAME
from decode.kv import Reader
from decode.models import load_model

WIDTHS = (1, 3)


@torch.no_grad()
def milliseconds(model: torch.nn.Module, context: int, repeats: int) -> dict[str, dict[int, float]]:
    """Median of each attention and width, after `context` random tokens."""
    ids = torch.randint(5, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    reader = Reader(model)
    reader.read(ids, keep=1)
    took: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in ("sdpa", NAME)}
    for _ in range(repeats):
        for name, of_width in took.items():
            model.set_attn_implementation(name)
            for width, seconds in of_width.items():
                began = perf_counter()
                reader.read(ids[:, :width])
                seconds.append(perf_counter() - began)
                reader.rewind(context)
    return {name: {width: 1000 * median(s) for width, s in of_width.items()} for name, of_width in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default="models/smollm2-135m-instruct", help="folder or Hub id of a causal model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 500, 1000, 2000, 4000, 8000], help="tokens")
    parser.add_argument("--repeats", type=int, default=15, help="of which the median counts")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    asked = parser.parse_args()
    model = load_model(asked.target, asked.dtype, device="cpu").model
    table = Table("context", "plain, sdpa, ms", "plain, ours", "of 3, sdpa", "of 3, ours", "plain: sdpa ÷ ours")
    ratios = {}
    for context in track(asked.contexts, "contexts"):
        found = milliseconds(model, context, asked.repeats)
        ratios[context] = found["sdpa"][1] / found[NAME][1]
        times = [found[name][width] for width in WIDTHS for name in ("sdpa", NAME)]
        table.add_row(str(context), *(f"{time:.1f}" for time in times), f"{ratios[context]:.2f}")
    Console().print(table)
    print(json.dumps({"threads": torch.get_num_threads(), "sdpa_over_ours": ratios}))


if __name__ == "__main__":
    main()
