#!/usr/bin/env python3
"""Training from cached log-probabilities against an online teacher, for a one-layer draft with an 8k head.

usage: scripts/bench_cache.py [TOKENS]   (needs `make setup`; default 20000 supervised tokens; the cache stays in
                                          runs/bench-cache-TOKENS and is used again)

The chats are the docstrings of Python's standard library, as answers to a question about each name. Online and cached
steps run in turn on the same rows, teacher and draft in float32. The last line is one JSON object:
`bytes_per_token` on disk, `throughput_over_online`, `cache_tokens`, `cache_tokens_per_s` (null when it was there).
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from decode.drafts.head import head_ids, trim_head  # noqa: E402
from decode.models import load_model  # noqa: E402
from distill.batches import Schedule  # noqa: E402
from distill.build import build_lm_draft  # noqa: E402
from distill.job import cache_identity, read_data  # noqa: E402
from distill.job_settings import JobSettings  # noqa: E402
from distill.logit_cache import LogitCache, scored_by, write_cache  # noqa: E402
from distill.objectives import objective  # noqa: E402
from distill.step import DistillStep  # noqa: E402
from distill.students import LMStudent  # noqa: E402
from distill.supply import Supply  # noqa: E402
from distill.teacher import Teacher  # noqa: E402
from distill.vocabulary import choose_ids, count_tokens, kept_always  # noqa: E402

TARGET = ROOT / "models" / "smollm2-135m-instruct"
ROWS, STEPS, VOCABULARY = 4, 12, 8192


def docstrings():
    """(name, docstring) of what the standard library exports, in a fixed order."""
    silent = {"antigravity", "idlelib", "lib2to3", "this", "tkinter", "turtle", "turtledemo"}
    names = sorted(name for name in set(sys.stdlib_module_names) - silent if not name.startswith("_"))
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception:
            continue  # another platform's
        for key, value in sorted(vars(module).items()):
            members = sorted(vars(value).items()) if inspect.isclass(value) else ()
            for path, thing in ((key, value), *((f"{key}.{member}", thing) for member, thing in members)):
                text = inspect.getdoc(thing) if not path.startswith("_") and callable(thing) else None
                if text and len(text) > 80:
                    yield f"{name}.{path}", text


def write_chats(path: Path, tokenizer, tokens: int) -> None:
    """Chats with about `tokens` answer tokens in all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count, seen, lines = 0, set(), []
    for name, text in docstrings():
        if count >= tokens:
            break
        if text not in seen:
            seen.add(text)
            count += min(len(tokenizer(text).input_ids), 400)
            turns = [("user", f"What does {name} do in Python?"), ("assistant", text)]
            lines.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    folder = ROOT / "runs" / f"bench-cache-{tokens}"
    data = {"answers": folder / "chats.jsonl", "max_tokens": 448}
    settings = JobSettings(target=str(TARGET), output=folder, data=data, cache={"folder": folder / "cache"})
    target = load_model(str(TARGET), "float32")
    if not settings.data.answers.is_file():
        write_chats(settings.data.answers, target.tokenizer, tokens)
    rows, teacher = read_data(settings, target), Teacher(target.model)
    fresh = not (folder / "cache" / "manifest.json").is_file()
    began = perf_counter()
    manifest = write_cache(
        scored_by(teacher), rows, settings.cache, cache_identity(settings, target), target.model.config.vocab_size
    )
    writing_s = perf_counter() - began
    on_disk = sum((folder / "cache" / shard.file).stat().st_size for shard in manifest.shards)

    draft = build_lm_draft(target.model, (0,))
    counts = count_tokens(rows, target.model.config.vocab_size)
    trim_head(draft, choose_ids(counts, VOCABULARY, kept_always(target, counts), len(target.tokenizer)))
    step = DistillStep(LMStudent(draft), objective("forward_kl"), head_ids=head_ids(draft))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-4)
    alone = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    cache = LogitCache(folder / "cache", rows, cache_identity(settings, target))
    sequences = [[row] for row in rows]
    arms = {
        name: Supply(sequences, Schedule(len(rows), ROWS, 0), teacher, ROWS, alone, head_ids(draft), cache=kept)
        for name, kept in (("online", None), ("cached", cache))
    }
    pace = {name: [] for name in arms}
    for number in range(STEPS + 1):
        for name, supply in arms.items():
            began = perf_counter()
            for inputs in supply.micro_batches(number):
                (step(**inputs)[0] / inputs["predicts"].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number:  # the first one warms up
                pace[name].append(supply.supervised_tokens(number) / (perf_counter() - began))
    for name, values in pace.items():
        print(f"{name}: {median(values):.0f} supervised tokens per second")
    print(f"{manifest.tokens} tokens, {on_disk / manifest.tokens:.1f} bytes each")
    result = {
        "bytes_per_token": on_disk / manifest.tokens,
        "throughput_over_online": median(pace["cached"]) / median(pace["online"]),
        "cache_tokens": manifest.tokens,
        "cache_tokens_per_s": manifest.tokens / writing_s if fresh else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
