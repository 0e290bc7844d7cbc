"""What a plain step, a draft step, a verification and the rest of a round cost on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.generation import Settings, device_clock, generate_ids
from decode.kv import Reader
from decode.stops import Stops

ROUNDS = 24
REPEATS = 9


@dataclass(frozen=True)
class Latency:
    """Costs in units of one plain step: c a draft step with its sampling, v a verification, o the rest of a round."""

    plain_step_s: float
    c: float
    v: float
    o: float
    verify_by_width: dict[int, float]


def profile(
    target: Any, draft: Draft[Any], prompt_ids: list[int], settings: Settings, gamma: int, longest: int
) -> Latency:
    """Measure on the decoder's own rounds of γ; medians, with plain and speculative rounds taken in turn.

    `verify_by_width` holds v(n) for n = 1..`longest`+1 tokens, from bare forwards after the prompt.
    """
    plain_s: list[float] = []
    draft_s: list[float] = []
    verify_s: list[float] = []
    rest_s: list[float] = []
    for _ in range(3):
        plain = generate_ids(target, None, prompt_ids, _without_end(settings, ROUNDS + 1))
        plain_s += [r.round_s for r in plain.rounds]
        drafted = generate_ids(
            target, draft, prompt_ids, _without_end(replace(settings, num_draft_tokens=gamma), ROUNDS + 1)
        )
        # The last rounds may draft less than γ.
        rounds = [r for r in drafted.rounds if len(r.drafted) == gamma]
        draft_s += [r.draft_s / len(r.drafted) for r in rounds]
        verify_s += [r.verify_s for r in rounds]
        rest_s += [r.round_s - r.draft_s - r.verify_s for r in rounds]
    if not (plain_s and rest_s):
        raise UserError(
            f"the shortest prompt has {len(prompt_ids)} tokens and leaves no room in the context to measure a round"
        )
    step = median(plain_s)
    widths = verify_widths(target, prompt_ids, range(1, longest + 2))
    return Latency(
        plain_step_s=step,
        c=median(draft_s) / step,
        v=median(verify_s) / step,
        o=median(rest_s) / step,
        verify_by_width={width: seconds / step for width, seconds in widths.items()},
    )


@torch.no_grad()
def verify_widths(target: Any, prompt_ids: list[int], widths: Sequence[int]) -> dict[int, float]:
    """Seconds of one forward over n tokens after the prompt, for each n: medians, widths taken in turn."""
    device = next(target.parameters()).device
    clock = device_clock(device)
    reader = Reader(target)
    reader.read(torch.tensor([prompt_ids], device=device), keep=1)
    ids = torch.tensor([prompt_ids], device=device)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(REPEATS):
        for width in widths:
            began = clock()
            reader.read(ids.repeat(1, width)[:, :width])
            times[width].append(clock() - began)
            reader.rewind(len(prompt_ids))
    return {width: median(seconds) for width, seconds in times.items()}


def fastest_threads(target: Any, prompt_ids: list[int], settings: Settings) -> int:
    """The number of CPU threads with which plain decoding is fastest: the baseline must not be a weak one."""
    most = torch.get_num_threads()
    candidates = sorted({1, max(1, most // 2), most})
    if next(target.parameters()).device.type != "cpu" or len(candidates) == 1:
        return most
    times: dict[int, list[float]] = {threads: [] for threads in candidates}
    for _ in range(3):
        for threads in candidates:
            torch.set_num_threads(threads)
            plain = generate_ids(target, None, prompt_ids, _without_end(settings, 9))
            times[threads] += [r.round_s for r in plain.rounds]
    torch.set_num_threads(most)
    return min(candidates, key=lambda threads: median(times[threads]))


def _without_end(settings: Settings, max_new_tokens: int) -> Settings:
    """The same law, for a fixed number of tokens: a profile must not end with the answer."""
    return replace(settings, max_new_tokens=max_new_tokens, stops=Stops())
