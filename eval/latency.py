"""What a plain step, a draft step, a verification and the rest of a round cost on this machine."""

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.draws import SeededDraws
from decode.generation import Settings, device_clock, generate_ids
from decode.kv import Reader
from decode.laws import Law
from decode.length import Costs
from decode.stops import Stops
from eval.stats import Interval, median_interval

REPEATS = 9
ROUNDS = 8


@dataclass(frozen=True)
class Latency:
    """Costs in units of one plain step: c a draft step with its sampling, v a verification, o the rest of a round.

    `intervals` are 95 % ones of the medians, that of v(n) under "v(n)".
    """

    plain_step_s: float
    c: float
    v: float
    o: float
    verify_by_width: dict[int, float]
    intervals: dict[str, Interval]

    @property
    def costs(self) -> Costs:
        """What a prediction needs of it."""
        return Costs(self.c, self.o, self.verify_by_width)


def profile(
    target: Any, draft: Draft[Any], prompt_ids: list[int], settings: Settings, gamma: int, longest: int
) -> Latency:
    """Measure the decoder's own rounds of γ, and v(n) for n = 1..`longest`+1 from bare forwards after the prompt.

    Plain steps, rounds and widths are taken in turn, `REPEATS` times over, so that a change of the machine's pace
    reaches all of them. A curve that is not monotone is kept as it is.
    """
    plain_settings = _without_end(settings, ROUNDS + 1)
    drafting = replace(_without_end(settings, ROUNDS + gamma + 1), num_draft_tokens=gamma)
    times: dict[str, list[float]] = defaultdict(list)
    widths, others = Widths(target, prompt_ids), list[float]()
    for _ in range(REPEATS):
        steps = generate_ids(target, None, prompt_ids, plain_settings).rounds
        times["plain"] += [r.round_s for r in steps]
        others += [r.round_s - r.verify_s for r in steps]
        # The last rounds may draft less than γ.
        rounds = [r for r in generate_ids(target, draft, prompt_ids, drafting).rounds if len(r.drafted) == gamma]
        times["c"] += [r.draft_s / gamma for r in rounds]
        times["v"] += [r.verify_s for r in rounds]
        times["o"] += [r.round_s - r.draft_s - r.verify_s for r in rounds]
        for width in range(1, longest + 2):
            times[f"v({width})"].append(widths.seconds(width))
    if times["plain"] and not times["o"] and not list(draft.model.parameters()):
        times |= {
            "c": [0.0],
            "v": times[f"v({gamma + 1})"],
            "o": others,
        }  # a lookup that found nothing after this prompt
    if not (times["plain"] and times["o"]):
        raise UserError(
            f"the shortest prompt has {len(prompt_ids)} tokens and leaves no room in the context to measure a round"
        )
    step = median(times.pop("plain"))
    middle = {name: median(seconds) / step for name, seconds in times.items()}
    return Latency(
        plain_step_s=step, c=middle["c"], v=middle["v"], o=middle["o"],
        verify_by_width={width: middle[f"v({width})"] for width in range(1, longest + 2)},
        intervals={name: _over(median_interval(seconds), step) for name, seconds in times.items()},
    )  # fmt: skip


def _over(interval: Interval, step: float) -> Interval:
    return interval[0] / step, interval[1] / step


def batched(target: Any, draft: Draft[Any], prompt_ids: list[int], batch: int, longest: int, alone: Latency) -> Latency:
    """Costs for `batch` rows that decode together, in steps of plain decoding of as many rows.

    From bare forwards, without the decoder's own work. The rest of a round takes as long as it does
    `alone`, for one row.
    """
    widths, text = Widths(target, prompt_ids, batch), torch.tensor([prompt_ids], device=_device(target))
    reader = Reader(target, taps=draft.taps)
    with torch.no_grad():
        reader.read(text[:, :-1], keep=1)
    tapped = None if reader.tapped is None else reader.tapped.expand(batch, -1, -1)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for width in range(1, longest + 2):
            times[f"v({width})"].append(widths.seconds(width))
        times["c"].append(max(0.0, _draft_step_seconds(draft, text.expand(batch, -1), tapped)))
    step = median(times["v(1)"])
    middle = {name: median(seconds) / step for name, seconds in times.items()}
    intervals = {name: _over(median_interval(seconds), step) for name, seconds in times.items()}
    rest = alone.plain_step_s / step
    return Latency(
        plain_step_s=step, c=middle["c"], v=middle[f"v({longest + 1})"], o=alone.o * rest,
        verify_by_width={width: middle[f"v({width})"] for width in range(1, longest + 2)},
        intervals=intervals | {"o": _over(alone.intervals["o"], 1 / rest)},
    )  # fmt: skip


@torch.no_grad()
def _draft_step_seconds(draft: Draft[Any], text: torch.Tensor, tapped: torch.Tensor | None) -> float:
    """Of a drafted token: what five take, less what one takes, after a first proposal has read the text."""
    clock = device_clock(text.device)
    state = draft.start(text, tapped, clock)
    hidden = None if tapped is None else tapped[:, -1:]
    took = []
    for tokens in (1, 5, 1):
        began = clock()
        draft.propose(state, tokens, Law(0.0), SeededDraws(0, text.device))
        took.append(clock() - began)
        draft.commit(state, text[:, -1:], hidden)
    return (took[1] - took[2]) / 4


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


class Widths:
    """Times bare forwards of the target over n tokens after a prompt, for `batch` rows at once.

    `read_s` is what reading the prompt took.
    """

    def __init__(self, target: Any, prompt_ids: list[int], batch: int = 1) -> None:
        device = _device(target)
        self._clock = device_clock(device)
        self._reader = Reader(target)
        self._ids = torch.tensor([prompt_ids], device=device).expand(batch, -1)
        began = self._clock()
        with torch.no_grad():
            self._reader.read(self._ids, keep=1)
        self.read_s = self._clock() - began

    @torch.no_grad()
    def seconds(self, width: int) -> float:
        """Of one forward over `width` tokens."""
        ids = self._ids[:, torch.arange(width) % self._ids.shape[1]]
        began = self._clock()
        self._reader.read(ids)
        took = self._clock() - began
        self._reader.rewind(self._ids.shape[1])
        return took


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
