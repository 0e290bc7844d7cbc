"""Prefill, rounds, stops: from the ids of a prompt to those of an answer, and its trace."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from decode.drafts.contract import Draft
from decode.drafts.temperature import drafting_temperature
from decode.draws import Draws, SeededDraws, SharedNoise
from decode.encoder_decoder import check_source
from decode.kv import Clock, Reader
from decode.laws import Law
from decode.length import Fixed, LengthPolicy
from decode.processors import Penalties
from decode.prompt_cache import Found, PromptCache, joined
from decode.round import Pair, Rules, play_round
from decode.stops import Stops, StopWatch
from decode.trace import Round, Tally
from decode.verify import DEFAULT_VERIFIER, VERIFIERS


@dataclass(frozen=True)
class Settings:
    """What is asked of one call.

    `num_draft_tokens` is γ, or a policy that picks it each round (decode/length.py). `seed` None is another one in
    each call. `verifier` is token, block or match; None is block. `draft_temperature` lets the draft draw from another
    law than the target; None is the target's. `seed_exact` shares the noise of each place between draft and target,
    so that a sampled answer equals the sampled plain answer of the same seed; it verifies by match.
    """

    law: Law = field(default_factory=Law)
    max_new_tokens: int = 128
    num_draft_tokens: int | LengthPolicy = 3
    stops: Stops = field(default_factory=Stops)
    seed: int | None = None
    verifier: str | None = None
    penalties: Penalties = field(default_factory=Penalties)
    draft_temperature: float | None = None
    seed_exact: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_draft_tokens, int):
            Fixed(self.num_draft_tokens)
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: expected 1 or more")
        if self.chosen_verifier not in VERIFIERS:
            raise UserError(f"verifier {self.verifier!r}: expected {', '.join(VERIFIERS)}")
        if self.seed_exact and self.chosen_verifier != "match":
            raise UserError(f"seed_exact verifies by match: verifier {self.verifier!r} has no effect; leave it out")
        self.draft_law(self.law)  # refuses a bad draft temperature

    @property
    def chosen_verifier(self) -> str:
        return self.verifier or ("match" if self.seed_exact else DEFAULT_VERIFIER)

    def target_law(self, prompt_tokens: int, device: torch.device) -> Law:
        """The target's law for one prompt: `law` with the penalties as its first processors."""
        penalties = self.penalties.processors(prompt_tokens, self.stops.eos_ids, device)
        return replace(self.law, processors=(*penalties, *self.law.processors))

    def draft_law(self, target_law: Law, fitted: Mapping[float, float] | None = None) -> Law:
        """The draft's law: the target's at the asked for temperature, else at the one `fitted` to it (Draft)."""
        if self.draft_temperature is None:
            if target_law.is_greedy:
                return target_law
            return replace(target_law, temperature=drafting_temperature(fitted or {}, target_law.temperature))
        if self.draft_temperature == 0:
            return target_law.greedy()
        return replace(target_law, temperature=self.draft_temperature)

    def length_policy(self) -> LengthPolicy:
        """A fresh policy for one call."""
        gamma = self.num_draft_tokens
        return (Fixed(gamma) if isinstance(gamma, int) else gamma).start()


@dataclass
class Generation:
    """An answer as it grows: its tokens (the first comes from prefill), its rounds, its times."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stopped_by: str = ""
    seed: int = 0

    @property
    def tally(self) -> Tally:
        return Tally.of(self.rounds)


def generate_ids(
    target: Any, draft: Draft[Any] | None, prompt_ids: list[int], settings: Settings,
    tokenizer: Any = None, draws: Draws | None = None, clock: Clock | None = None, cache: PromptCache | None = None,
) -> Generation:  # fmt: skip
    """Decode to the end. `target` is a causal LM; without `draft` this is plain decoding.

    The output follows the target's law exactly, whatever the draft. Neither model is changed, nor torch's global
    random state. `tokenizer` is needed for stop strings only. `cache` keeps what prompts have in common.
    Raises UserError for a prompt that is empty or does not fit the context.
    """
    *_, answer = stream_ids(target, draft, prompt_ids, settings, tokenizer, draws, clock, cache)
    return answer


@torch.no_grad()
def stream_ids(
    target: Any, draft: Draft[Any] | None, prompt_ids: list[int], settings: Settings,
    tokenizer: Any = None, draws: Draws | None = None, clock: Clock | None = None, cache: PromptCache | None = None,
) -> Iterator[Generation]:  # fmt: skip
    """Like `generate_ids`, but yields the growing answer after prefill and after every round."""
    limit, limit_reason = token_limit(target, prompt_ids, settings)
    watch = StopWatch(settings.stops, prompt_ids, limit, limit_reason, tokenizer)
    device = next(target.parameters()).device
    answer = Generation(seed=seed_of(settings))
    rules = rules_for(replace(settings, seed=answer.seed), draft, len(prompt_ids), device, draws)
    clock = clock or device_clock(device)
    policy = settings.length_policy()

    began = clock()
    ids, taps = torch.tensor([prompt_ids], device=device), draft.taps if draft else ()
    known = cache.find(prompt_ids, target, draft, clock) if cache else None
    reader, reused = (known.reader, known.tokens) if known else (Reader(target, clock, taps), 0)
    first = rules.draws.choose(rules.target_law(reader.read(ids[:, reused:], keep=1), ids), len(prompt_ids))
    pair = Pair(reader, torch.cat([ids, first], dim=1))
    hidden = joined([known.tapped if known else None, reader.tapped])
    tapped = [hidden] if cache else []
    if draft is not None and not reader.can_rewind:
        raise UserError(
            "this target keeps a running state that cannot be taken back after a rejected token; use no draft"
        )
    if draft is not None and len(prompt_ids) < draft.context_tokens:
        pair.draft, pair.draft_state = draft, _draft_state(draft, pair.text, hidden, known, clock)
    answer.token_ids.append(int(first))
    watch.keep(answer.token_ids)
    answer.prefill_s = clock() - began
    answer.stopped_by = watch.reason
    if cache:
        cache.count(len(prompt_ids), reused, answer.prefill_s)
    yield answer

    while not answer.stopped_by:
        began = clock()
        num_draft_tokens = min(policy.next_length(), watch.left - 1, _draft_room(pair))
        done = play_round(pair, num_draft_tokens, rules, watch.keep, clock)
        policy.learn(done)
        if cache and reader.tapped is not None:
            tapped.append(reader.tapped[:, : len(done.tokens)])
        answer.rounds.append(done)
        answer.token_ids += done.tokens
        answer.stopped_by = watch.reason
        answer.decode_s += clock() - began
        yield answer
    if cache:
        cache.keep(pair.text[0, :-1].tolist(), reader, joined(tapped), pair.draft, pair.draft_state)


def _draft_state(draft: Draft[Any], text: Tensor, hidden: Tensor | None, known: Found | None, clock: Clock) -> Any:
    """The draft follows the committed text, from where a kept state of it ends, if it can."""
    if known is not None and known.draft_state is not None:
        state = draft.resume(known.draft_state, text, hidden, known.tokens, clock)
        if state is not None:
            return state
    return draft.start(text, hidden, clock)


def _draft_room(pair: Pair) -> int:
    """Tokens that the draft can still draft within its own context; 0 without a draft. It reads all but the last."""
    return max(0, pair.draft.context_tokens + 1 - pair.text.shape[1]) if pair.draft else 0


def device_clock(device: torch.device) -> Clock:
    """Wall-clock seconds; on an accelerator the work handed to it is waited for first."""
    if device.type == "cpu":
        return perf_counter

    def synchronised() -> float:
        torch.accelerator.synchronize(device)
        return perf_counter()

    return synchronised


def seed_of(settings: Settings) -> int:
    """The seed that is asked for, or another one in each call."""
    return secrets.randbits(31) if settings.seed is None else settings.seed


def rules_for(
    settings: Settings, draft: Draft[Any] | None, prompt_tokens: int, device: torch.device, draws: Draws | None = None
) -> Rules:
    """What stays the same from round to round of one text; without `draws`, those of the settings' seed."""
    law, seed = settings.target_law(prompt_tokens, device), seed_of(settings)
    draft_law = settings.draft_law(law, draft.temperatures if draft else None)
    draws = draws or (SharedNoise(seed, device) if settings.seed_exact else SeededDraws(seed, device))
    return Rules(law, draft_law, VERIFIERS[settings.chosen_verifier], draws)


def token_limit(target: Any, prompt_ids: list[int], settings: Settings) -> tuple[int, str]:
    """How many tokens an answer may have, and why. Raises UserError for a prompt that is empty or leaves no room."""
    context = target.config.max_position_embeddings
    if not prompt_ids:
        raise UserError("the prompt is empty; expected at least one token")
    check_source(target, prompt_ids)
    if len(prompt_ids) >= context:
        raise UserError(f"the prompt has {len(prompt_ids)} tokens; this target holds {context}, answer included")
    left = context - len(prompt_ids)
    return (settings.max_new_tokens, "max_new_tokens") if settings.max_new_tokens <= left else (left, "context")
