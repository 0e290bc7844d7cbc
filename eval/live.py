"""Decoding a suite for real: plain, speculative and HF generate on the same prompts, in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import LogitsProcessor

from decode.compiled import uncompiled
from decode.drafts.contract import Draft
from decode.generation import Generation, Settings, device_clock, generate_ids
from decode.hf import hf_generate
from decode.kv import Clock
from decode.models import Loaded
from eval.stats import Timed
from eval.suites import Prompt


@dataclass(frozen=True)
class Arm:
    """One way of decoding one prompt: its tokens, and prefill and decode seconds (median over repeats).

    `spread` is the difference of the slowest and the fastest repeat ÷ the median; None for one run.
    """

    token_ids: list[int]
    prefill_s: float
    decode_s: float
    spread: float | None = None

    @property
    def decode(self) -> Timed:
        return Timed(self.decode_s, max(0, len(self.token_ids) - 1))

    @property
    def end_to_end(self) -> Timed:
        return Timed(self.prefill_s + self.decode_s, len(self.token_ids))


@dataclass(frozen=True)
class PromptRun:
    """What each arm made of one prompt; `trace` is the speculative answer with its rounds."""

    prompt: Prompt
    prompt_ids: list[int]
    plain: Arm
    speculative: Arm
    hf: Arm
    trace: Generation


def run_prompt(
    target: Loaded, draft: Draft[Any], prompt: Prompt, prompt_ids: list[int], settings: Settings, repeats: int,
    first: int,
) -> PromptRun:  # fmt: skip
    """Decode one prompt with every arm, `repeats` times; arm number `first` goes first, the others follow in turn."""
    traces: list[Generation] = []

    def speculative() -> Arm:
        traces.append(generate_ids(target.model, draft, prompt_ids, settings, target.tokenizer))
        return _arm(traces[-1])

    arms: list[Callable[[], Arm]] = [
        lambda: _arm(generate_ids(target.model, None, prompt_ids, settings, target.tokenizer)),
        speculative,
        lambda: hf_arm(target, prompt_ids, settings),
    ]
    results: list[list[Arm]] = [[] for _ in arms]
    for repeat in range(repeats):
        for turn in range(len(arms)):
            number = (first + repeat + turn) % len(arms)
            results[number].append(arms[number]())
    plain, drafted, hf = (_median_arm(result) for result in results)
    return PromptRun(prompt, prompt_ids, plain, drafted, hf, traces[0])


def run_pair(
    target: Loaded, draft: Draft[Any], prompt_ids: list[int], settings: Settings, plain_first: bool
) -> tuple[Arm, Generation]:
    """One plain and one speculative answer."""
    found = {}
    for name in ("plain", "drafted") if plain_first else ("drafted", "plain"):
        found[name] = generate_ids(
            target.model, draft if name == "drafted" else None, prompt_ids, settings, target.tokenizer
        )
    return _arm(found["plain"]), found["drafted"]


def hf_arm(target: Loaded, prompt_ids: list[int], settings: Settings) -> Arm:
    """transformers' own generate under the same law and stops, with the end of its prefill noted."""
    model = uncompiled(target.model)
    clock = device_clock(model.device)
    law = settings.target_law(len(prompt_ids), model.device)
    ends: dict[str, Any] = {"stopping_criteria": list(settings.stops.criteria)}
    if settings.stops.strings:
        ends |= {"stop_strings": list(settings.stops.strings), "tokenizer": target.tokenizer}
    watch = _PrefillWatch(clock)
    began = clock()
    (answer,) = hf_generate(
        model, [prompt_ids], law, settings.max_new_tokens, settings.stops.eos_ids, settings.seed or 0,
        logits_processor=[watch], **ends,
    )  # fmt: skip
    return Arm(answer, watch.first_call - began, clock() - watch.first_call)


class _PrefillWatch(LogitsProcessor):  # type: ignore[misc]
    """Called once per token with its logits: the first call is the end of prefill."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.first_call = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.first_call = self.first_call or self.clock()
        return scores


def _arm(generation: Generation) -> Arm:
    return Arm(generation.token_ids, generation.prefill_s, generation.decode_s)


def _median_arm(repeats: list[Arm]) -> Arm:
    seconds = [arm.decode_s for arm in repeats]
    middle = median(seconds)
    spread = (max(seconds) - min(seconds)) / middle if len(repeats) > 1 and middle else None
    return Arm(repeats[0].token_ids, median(arm.prefill_s for arm in repeats), middle, spread)
