"""What a prompt cache would save on these prompts: read in turn, each with what it shares with those before."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode.drafts.contract import Draft
from decode.generation import Settings, generate_ids
from decode.models import Loaded
from decode.prompt_cache import PromptCache
from eval.report import PrefixReuse


def prefix_reuse(target: Loaded, draft: Draft[Any], prompts: Sequence[list[int]], settings: Settings) -> PrefixReuse:
    """Prefill alone, with and without a cache, prompt by prompt."""
    cache, prefill = PromptCache(), replace(settings, max_new_tokens=1)
    seconds = {False: 0.0, True: 0.0}
    for number, ids in enumerate(prompts):
        for cached in (False, True) if number % 2 == 0 else (True, False):
            answer = generate_ids(target.model, draft, ids, prefill, target.tokenizer, cache=cache if cached else None)
            seconds[cached] += answer.prefill_s
    return PrefixReuse(
        prompts=len(prompts), prompt_tokens=cache.prompt_tokens, reused_tokens=cache.reused_tokens,
        hit_rate=cache.hit_rate or 0.0, prefill_s=seconds[False], prefill_with_cache_s=seconds[True],
    )  # fmt: skip
