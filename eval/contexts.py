"""How a pair fares after long texts: what a plain step, verification and drafting cost there, and what is left of S."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from configs.errors import UserError
from configs.records import append_record, whole_records
from decode.drafts.contract import Draft
from decode.generation import Generation, Settings, generate_ids
from decode.models import Loaded
from decode.prompt_cache import PromptCache
from decode.stops import Stops
from decode.trace import Tally
from eval.footprint import GIB, kv_bytes_per_token
from eval.report import ContextPoint

TOKENS, TURNS = 48, 2  # decoded after the text, and times that both arms do
COPIES = 3  # of keys and values at a time: a kept one of each arm, and that which grows


def sweep_contexts(
    target: Loaded, draft: Draft[Any], prompts: Sequence[list[int]], settings: Settings, lengths: Sequence[int],
    unfinished: Path,
) -> list[ContextPoint]:  # fmt: skip
    """One point for each length in tokens; those that `unfinished` has already are read back.

    The text is the prompts one after another, and again from the first where they are too few.
    """
    points = [ContextPoint.model_validate(row) for row in whole_records(unfinished)]
    for length in lengths[len(points) :]:
        per_thousand = 1000 * sum(kv_bytes_per_token(model) for model in (target.model, draft.model)) / GIB
        print(
            f"context of {length} tokens: {COPIES * per_thousand * length / 1000:.2f} GiB of keys and values "
            f"({COPIES} times {1024 * per_thousand:.1f} MiB per 1,000 tokens)",
            file=sys.stderr,
        )
        text = list(islice(chain.from_iterable(cycle(prompts)), length))
        points.append(_point(target, draft, text, settings, per_thousand))
        append_record(unfinished, points[-1].model_dump(mode="json"))
    return points


def check_contexts(target: Loaded, lengths: Sequence[int]) -> None:
    """Raises UserError for a length that leaves no room in the target's context, and for a target with an encoder."""
    if lengths and target.model.config.is_encoder_decoder:
        raise UserError("sweep_contexts: an encoder–decoder target does not go on with a long text; leave it out")
    longest = target.context_tokens - TOKENS - 1
    if lengths and max(lengths) > longest:
        raise UserError(f"sweep_contexts {max(lengths)}: {target.name} has room for {longest} tokens before an answer")


def _point(target: Loaded, draft: Draft[Any], text: list[int], settings: Settings, per_thousand: float) -> ContextPoint:
    """Plain and speculative in turn after one text, which each of them reads once."""
    endless, cache = replace(settings, max_new_tokens=TOKENS, stops=Stops()), PromptCache(size=2)
    plain: list[Generation] = []
    drafted: list[Generation] = []
    for turn in range(TURNS):
        for arm in (plain, drafted) if turn % 2 == 0 else (drafted, plain):
            arm.append(
                generate_ids(
                    target.model, draft if arm is drafted else None, text, endless, target.tokenizer, cache=cache
                )
            )  # fmt: skip
    step = median(r.round_s for answer in plain for r in answer.rounds)
    rounds = [r for answer in drafted for r in answer.rounds]
    full = [r for r in rounds if r.drafted]
    return ContextPoint(
        tokens=len(text), prefill_s=max(answer.prefill_s for answer in plain), plain_step_s=step,
        draft_cost=median(r.draft_s / len(r.drafted) for r in full) / step if full else None,
        verify_cost=median(r.verify_s for r in full) / step if full else None, tau=Tally.of(rounds).tau,
        speedup_decode=sum(a.decode_s / (len(a.token_ids) - 1) for a in plain)
        / sum(a.decode_s / (len(a.token_ids) - 1) for a in drafted),
        kv_gib_per_1000_tokens=per_thousand,
    )  # fmt: skip
