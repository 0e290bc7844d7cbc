#!/usr/bin/env python3
"""Our decoder against transformers', on the same prompts and draft, interleaved in one process.

usage: scripts/bench_decode.py [--compile]   (needs `make setup`; the first run makes and caches a draft in runs/bench)

Prints a table and, as its last line, one JSON object. Times are ratios within this run; `*_t1` keys are at
temperature 1. `ours_over_hf_assisted` compares each at its own best draft length. A tiny random pair (4 layers,
64 wide) shows the host's share of the work. With --compile (minutes more) our arms run compiled as well, at
temperature 0.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

from decode.chat import render_prompt  # noqa: E402
from decode.compiled import Compiled  # noqa: E402
from decode.drafts.lm import LMDraft  # noqa: E402
from decode.generation import Settings, generate_ids  # noqa: E402
from decode.laws import Law  # noqa: E402
from decode.models import load_model  # noqa: E402
from distill.answers import write_answers  # noqa: E402
from distill.build import build_lm_draft  # noqa: E402
from distill.job import run  # noqa: E402
from distill.job_settings import JobSettings  # noqa: E402
from eval.latency import fastest_threads  # noqa: E402
from eval.suites import find_prompts, read_prompts, stratified  # noqa: E402

TARGET = ROOT / "models" / "smollm2-135m-instruct"
LENGTHS = (1, 2, 4)
PROMPTS, TOKENS = 6, 48


def cached_draft() -> Path:
    """A two-layer draft after a minute or two of training: often enough right to make rounds of every kind."""
    folder = ROOT / "runs" / "bench"
    data = {"answers": folder / "answers.jsonl", "prompts": "demo", "max_new_tokens": 48, "batch_rows": 64}
    train = {"steps": 60, "batch_rows": 4, "micro_rows": 4, "measure_every": 60, "save_every": 60}
    train["optim"] = {"learning_rate": 1e-3, "warmup_steps": 10}
    settings = JobSettings(target=str(TARGET), output=folder, data=data, train=train)
    if not (folder / "done.json").is_file():
        write_answers(load_model(str(TARGET)), settings.data, settings.seed)
    return run(settings)


def hf(model, prompt, law, assistant=None, length=0):
    """transformers' generate, plain or assisted with a constant draft length. Seconds per new token."""
    how = {"do_sample": False} if law.is_greedy else {"do_sample": True, "temperature": law.temperature, "top_k": 0}
    if assistant is not None:
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=length, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        how["assistant_model"] = assistant
    ids = torch.tensor([prompt])
    began = perf_counter()
    output = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0, **how)
    return (perf_counter() - began) / (output.shape[1] - len(prompt))


def ours(model, draft, prompt, law, length=1, rounds=None):
    """Our decoder, end to end. Seconds per new token; the rounds are noted in `rounds`."""
    began = perf_counter()
    answer = generate_ids(model, draft, prompt, Settings(law, TOKENS, length))
    seconds = perf_counter() - began
    if rounds is not None:
        rounds += answer.rounds
    return seconds / len(answer.token_ids)


def compare(model, assistant, prompts, law, compiled=None) -> dict[str, float]:
    """Every arm on every prompt, in turn; means over prompts of seconds per token."""
    draft = LMDraft(assistant)
    rounds = {length: [] for length in LENGTHS}
    arms: dict[str, Callable] = {"hf": lambda p: hf(model, p, law), "plain": lambda p: ours(model, None, p, law)}
    for n in LENGTHS:
        arms[f"hf_assisted {n}"] = lambda p, n=n: hf(model, p, law, assistant, n)
        arms[f"ours {n}"] = lambda p, n=n: ours(model, draft, p, law, n, rounds[n])
    if compiled:
        fast, fast_draft = compiled[0], LMDraft(compiled[1])
        fast_rounds = []
        arms["compiled plain"] = lambda p: ours(fast, None, p, law)
        arms["compiled 1"] = lambda p: ours(fast, fast_draft, p, law, 1, fast_rounds)
    times = {name: [] for name in arms}
    warm_up_s = 0.0
    floor = StreamingFloor(assistant)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            seconds = arms[name](prompt)
            floor.note()  # after the target's weights went by, as for a draft
            if number:
                times[name].append(seconds)
            elif name.startswith("compiled"):
                warm_up_s += seconds * TOKENS
    pace = {name: sum(values) / len(values) for name, values in times.items()}
    best = min(LENGTHS, key=lambda n: pace[f"ours {n}"])
    played = [r for r in rounds[best] if len(r.drafted) == best]
    whole = sum(r.round_s for r in played)
    forwards = sum(r.draft_forward_s + r.verify_s for r in played)
    emitted = [r for r in rounds[best] if r.drafted]
    found = pace | {
        "best_length": best,
        "assisted_best": min(pace[f"hf_assisted {n}"] for n in LENGTHS),
        "ours_best": pace[f"ours {best}"],
        "loop_efficiency": forwards / whole,
        "overhead_steps": (whole - forwards) / len(played) / pace["plain"],
        "draft_step_s": median(r.draft_forward_s / len(r.drafted) for r in played),
        "floor_s": median(floor.times),
        "tau": sum(len(r.tokens) for r in emitted) / len(emitted),
    }
    if compiled:
        found["compiled_draft_step_s"] = median(r.draft_forward_s for r in fast_rounds if r.drafted)
        found["compile_warm_up_s"] = warm_up_s
    return found


class StreamingFloor:
    """Times one product with a matrix as large as all that a step of `model` reads, as one kernel."""

    def __init__(self, model) -> None:
        weights = sum(p.numel() for p in model.parameters())
        self.matrix = torch.randn(weights // 1024, 1024, dtype=model.dtype)
        self.vector = torch.randn(1, 1024, dtype=model.dtype)
        self.times: list[float] = []

    def note(self) -> None:
        began = perf_counter()
        torch.nn.functional.linear(self.vector, self.matrix)
        self.times.append(perf_counter() - began)


def tiny_pair():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    return target, build_lm_draft(target, (0, 1, 2)).eval()


def show(title: str, found: dict[str, float]) -> None:
    table = Table("arm", "tokens/s", "over HF generate", title=title)
    for name, seconds in found.items():
        if name.split()[0] in ("hf", "plain", "hf_assisted", "ours", "compiled"):
            table.add_row(name, f"{1 / seconds:.1f}", f"{found['hf'] / seconds:.2f}×")
    Console().print(table)


def main() -> None:
    draft_folder = cached_draft()
    target = load_model(str(TARGET))
    model, assistant = target.model, load_model(str(draft_folder)).model
    prompts = stratified(read_prompts(find_prompts("suite")), PROMPTS)
    prompt_ids = [render_prompt(target.tokenizer, prompt.messages) for prompt in prompts]
    torch.set_num_threads(fastest_threads(model, min(prompt_ids, key=len), Settings()))
    model.generation_config = GenerationConfig()
    result: dict[str, float] = {"threads": torch.get_num_threads()}
    longest = max(map(len, prompt_ids)) + TOKENS + max(LENGTHS) + 1
    compiled = (
        [Compiled(m, longest, widest=max(LENGTHS) + 1) for m in (model, assistant)] if "--compile" in sys.argv else None
    )
    for law, suffix in ((Law(0.0), ""), (Law(1.0), "_t1")):
        found = compare(model, assistant, prompt_ids, law, None if suffix else compiled)
        show(f"SmolLM2-135M, {model.dtype}, temperature {law.temperature:g}", found)
        result |= {
            f"plain_over_hf{suffix}": found["hf"] / found["plain"],
            f"ours_over_hf_assisted{suffix}": found["assisted_best"] / found["ours_best"],
            f"loop_efficiency{suffix}": found["loop_efficiency"],
            f"overhead_steps{suffix}": found["overhead_steps"],
            f"draft_over_floor{suffix}": found["draft_step_s"] / found["floor_s"],
            f"tau{suffix}": found["tau"],
            f"speedup_decode{suffix}": found["plain"] / found["ours_best"],
        }
        if "compiled plain" in found:
            result |= {
                "compiled_plain_over_plain": found["plain"] / found["compiled plain"],
                "compiled_over_ours": found["ours 1"] / found["compiled 1"],
                "compiled_draft_over_floor": found["compiled_draft_step_s"] / found["floor_s"],
                "compile_warm_up_s": found["compile_warm_up_s"],
            }
    tiny_target, tiny_draft = tiny_pair()
    torch.set_num_threads(1)
    found = compare(tiny_target, tiny_draft, [[5, 9, 30, 7]] * 4, Law(0.0))
    show("tiny pair, float32", found)
    result["ours_over_hf_assisted_tiny"] = found["assisted_best"] / found["ours_best"]
    print(json.dumps({key: round(value, 4) for key, value in result.items()}))


if __name__ == "__main__":
    main()
