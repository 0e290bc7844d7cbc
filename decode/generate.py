"""Prefill, rounds, stops: from a prompt to an answer and its trace."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.draws import Draws, SeededDraws
from decode.kv import Reader
from decode.laws import Law
from decode.round import Clock, Pair, play_round
from decode.trace import Round, Tally


@dataclass(frozen=True)
class Settings:
    """What is asked of one call. `num_draft_tokens` is γ, tokens drafted per round."""

    law: Law = field(default_factory=Law)
    max_new_tokens: int = 128
    num_draft_tokens: int = 3
    eos_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise UserError(
                f"num_draft_tokens {self.num_draft_tokens}: expected 1 or more; leave out the draft to decode plainly"
            )
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: expected 1 or more")


@dataclass
class Generation:
    """An answer as it grows: its tokens (the first comes from prefill), its rounds, its times."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stopped_by: str = ""

    @property
    def tally(self) -> Tally:
        return Tally.of(self.rounds)

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def decode_tokens(self) -> int:
        """Tokens that decoding made: all but the one that prefill gave."""
        return max(0, len(self.token_ids) - 1)


def generate(
    target: Any, draft: Draft[Any] | None, prompt_ids: list[int], settings: Settings,
    draws: Draws | None = None, clock: Clock | None = None,
) -> Generation:  # fmt: skip
    """Decode to the end. `target` is a causal LM; without `draft` this is plain decoding.

    The output follows the target's law exactly, whatever the draft. Neither model is changed.
    Raises UserError for a prompt that is empty or does not fit the context.
    """
    *_, answer = stream(target, draft, prompt_ids, settings, draws, clock)
    return answer


@torch.no_grad()
def stream(
    target: Any, draft: Draft[Any] | None, prompt_ids: list[int], settings: Settings,
    draws: Draws | None = None, clock: Clock | None = None,
) -> Iterator[Generation]:  # fmt: skip
    """Like `generate`, but yields the growing answer after prefill and after every round."""
    limit = _token_limit(target, prompt_ids, settings)
    device = next(target.parameters()).device
    draws = draws or SeededDraws(settings.seed, device)
    clock = clock or device_clock(device)
    answer = Generation()

    began = clock()
    ids = torch.tensor([prompt_ids], device=device)
    reader = Reader(target)
    first = draws.choose(settings.law(reader.read(ids, keep=1)[:, -1]))
    pair = Pair(reader, last=first.unsqueeze(-1))
    if draft is not None:
        pair.draft, pair.draft_state = draft, draft.start(ids)
        draft.commit(pair.draft_state, pair.last)
    answer.token_ids.append(int(first))
    answer.prefill_s = clock() - began
    answer.stopped_by = _stop(answer.token_ids, settings, limit)
    yield answer

    began = clock()
    while not answer.stopped_by:
        left = limit - len(answer.token_ids)
        num_draft_tokens = min(settings.num_draft_tokens, left - 1) if draft is not None else 0
        answer.rounds.append(
            play_round(pair, num_draft_tokens, settings.law, draws, lambda new: _kept(new, settings), clock)
        )
        answer.token_ids += answer.rounds[-1].tokens
        answer.stopped_by = _stop(answer.token_ids, settings, limit)
        answer.decode_s = clock() - began
        yield answer


def device_clock(device: torch.device) -> Clock:
    """Wall-clock seconds; on an accelerator the work handed to it is waited for first."""
    if device.type == "cpu":
        return perf_counter

    def synchronised() -> float:
        torch.accelerator.synchronize(device)
        return perf_counter()

    return synchronised


def _token_limit(target: Any, prompt_ids: list[int], settings: Settings) -> int:
    context = target.config.max_position_embeddings
    if not prompt_ids:
        raise UserError("the prompt is empty; expected at least one token")
    if len(prompt_ids) >= context:
        raise UserError(f"the prompt has {len(prompt_ids)} tokens; this target holds {context}, answer included")
    return min(settings.max_new_tokens, context - len(prompt_ids))


def _kept(new: Any, settings: Settings) -> int:
    """How many of the new tokens stay: all up to the first end-of-answer token."""
    return next((i + 1 for i, token in enumerate(new) if token in settings.eos_ids), len(new))


def _stop(token_ids: list[int], settings: Settings, limit: int) -> str:
    if token_ids[-1] in settings.eos_ids:
        return "eos"
    if len(token_ids) < limit:
        return ""
    return "max_new_tokens" if limit == settings.max_new_tokens else "context"
