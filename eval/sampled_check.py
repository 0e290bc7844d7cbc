"""What can be checked of a run that sampled: its law on a few tokens, and equality under shared noise.

Shapes: V vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from rich.progress import track
from scipy.stats import chisquare
from torch import Tensor

from decode.drafts.contract import Draft
from decode.draws import SharedNoise
from decode.generation import Generation, Settings, generate_ids, stream_ids
from decode.kv import Reader
from decode.stops import Stops
from eval.text import first_difference

TOKENS = 3  # of each answer whose law is checked: one from prefill, two from rounds
CHOICES = 3  # tokens that the law allows at each place, so that every answer can be counted
FEWEST = 5.0  # expected answers in a bin of a chi-square
SURE = 1e-3
TIE = 1e-4

Tree = dict[tuple[int, ...], float]


class SampledCheck(BaseModel):
    """`law_p_value` is of a chi-square of `law_samples` answers of three tokens, under the run's own verifier, γ and
    processors and its law cut to three tokens at each place, against the exact law from plain forwards.
    `control_p_value` is of answers whose drafted tokens were all accepted: it must be small for the test to mean much.

    seed_exact_* compare sampled speculative with sampled plain decoding under shared noise, token by token: that checks
    caches, positions and rollback, by match and not by the run's verifier.
    """

    law_samples: int
    law_p_value: float | None
    control_p_value: float | None
    seed_exact_prompts: int
    seed_exact_tokens: int
    seed_exact_near_ties: int
    failures: list[str]

    @property
    def control_failed(self) -> bool:
        """Whether the chi-square tells a draft from its target at all; else it proves nothing, either way."""
        return self.control_p_value is not None and self.control_p_value < SURE


def check_sampling(
    target: Any, draft: Draft[Any], prompts: Mapping[str, list[int]], settings: Settings, samples: int, tokenizer: Any
) -> SampledCheck:
    """Both checks of two models in float32, on the `prompts` by id; the law on the first that leaves room for it.

    `settings.num_draft_tokens` is γ.
    """
    gamma = settings.num_draft_tokens
    assert isinstance(gamma, int)
    settings = replace(settings, stops=Stops(settings.stops.eos_ids))
    equal_tokens = near_ties = 0
    failures: list[str] = []
    shared = replace(settings, verifier=None, seed_exact=True, draft_temperature=None, seed=settings.seed or 0)
    for name, ids in prompts.items():
        plain, ours = (generate_ids(target, arm, ids, shared, tokenizer).token_ids for arm in (None, draft))
        equal_tokens += len(plain)
        at = first_difference(plain, ours)
        if at is None:
            continue
        if at < min(len(plain), len(ours)) and _noisy_gap(target, ids, plain, ours[at], at, shared) < TIE:
            near_ties += 1
        else:
            failures.append(f"{name}: the sampled answer differs from the plain one of the same noise")
    found, control = None, None
    room = int(target.config.max_position_embeddings) - TOKENS - gamma
    short = next((ids for ids in prompts.values() if len(ids) < room), None)
    if samples and short is not None:
        found, control = _law(target, draft, short, settings, gamma, samples)
        if found < SURE:
            failures.append(f"{samples} sampled answers do not follow the target's law (chi-square p = {found:.1e})")
    return SampledCheck(
        law_samples=samples if found is not None else 0, law_p_value=found, control_p_value=control,
        seed_exact_prompts=len(prompts),
        seed_exact_tokens=equal_tokens, seed_exact_near_ties=near_ties, failures=failures,
    )  # fmt: skip


@torch.no_grad()
def _noisy_gap(
    target: Any, prompt_ids: list[int], plain: Sequence[int], other: int, at: int, settings: Settings
) -> float:
    """How far the two tokens' noisy scores lie apart where a plain pass chose between them."""
    ids = torch.tensor([[*prompt_ids, *plain[:at]]], device=target.device)
    law = settings.target_law(len(prompt_ids), target.device)(target(input_ids=ids).logits[:, -1:], ids)
    noisy = SharedNoise(settings.seed or 0, target.device).scores(law, len(prompt_ids) + at)[0, 0]
    return float((noisy[plain[at]] - noisy[other]).abs())


def _law(
    target: Any, draft: Draft[Any], prompt_ids: list[int], settings: Settings, gamma: int, samples: int
) -> tuple[float, float]:
    """p-values of the pair's own answers, and of answers that accept whatever was drafted.

    Answers are decoded with room for a whole round of γ and cut to `TOKENS`.
    """
    law = replace(settings.law, top_k=min(CHOICES, settings.law.top_k or CHOICES))
    cut = replace(settings, law=law, max_new_tokens=TOKENS + gamma, stops=Stops())
    expected = _tree(prompt_ids, lambda text: _target_law(target, prompt_ids, text, cut))
    answers = (
        _first_tokens(stream_ids(target, draft, prompt_ids, replace(cut, seed=seed)))
        for seed in track(range(samples), "checking the law")
    )
    found = p_value(Counter(answers), expected, samples)
    accepting_all = _tree(
        prompt_ids,
        lambda text: (
            _draft_law(target, draft, prompt_ids, text, cut)
            if 1 <= len(text) - len(prompt_ids) <= gamma
            else _target_law(target, prompt_ids, text, cut)
        ),
    )
    draws = np.random.default_rng(0).multinomial(samples, np.array(list(accepting_all.values())))
    return found, p_value(dict(zip(accepting_all, draws.tolist(), strict=True)), expected, samples)


def _first_tokens(growing: Iterable[Generation]) -> tuple[int, ...]:
    """Of an answer that is long enough; the rest is not waited for."""
    answer = next(answer for answer in growing if len(answer.token_ids) >= TOKENS)
    return tuple(answer.token_ids[:TOKENS])


def p_value(counts: Mapping[tuple[int, ...], int], expected: Tree, samples: int) -> float:
    """Of a chi-square of counted answers against their law; rare ones share a bin, impossible ones give 0."""
    if any(count and answer not in expected for answer, count in counts.items()):
        return 0.0
    seen, due, rare_seen, rare_due = [], [], 0.0, 0.0
    for answer, chance in expected.items():
        if chance * samples >= FEWEST:
            seen.append(float(counts.get(answer, 0)))
            due.append(chance * samples)
        else:
            rare_seen, rare_due = rare_seen + counts.get(answer, 0), rare_due + chance * samples
    if rare_due >= FEWEST or not due:
        seen, due = [*seen, rare_seen], [*due, rare_due]
    elif rare_due:
        seen[-1], due[-1] = seen[-1] + rare_seen, due[-1] + rare_due
    if len(due) < 2:
        return 1.0
    return float(chisquare(seen, np.array(due) * (sum(seen) / sum(due))).pvalue)


def _tree(prompt_ids: list[int], law_of: Any) -> Tree:
    """The chance of every answer of `TOKENS` tokens, where `law_of(text)` is the law of the next token [V]."""
    answers: Tree = {(): 1.0}
    for _ in range(TOKENS):
        grown = (_grown(prompt_ids, answer, chance, law_of) for answer, chance in answers.items())
        answers = dict(chain.from_iterable(grown))
    return answers


def _grown(prompt_ids: list[int], answer: tuple[int, ...], chance: float, law_of: Any) -> list[Any]:
    law = law_of([*prompt_ids, *answer]).double()
    law = law / law.sum()
    return [((*answer, int(token)), chance * float(law[token])) for token in law.nonzero().flatten()]


@torch.no_grad()
def _target_law(target: Any, prompt_ids: list[int], text: list[int], settings: Settings) -> Tensor:
    ids = torch.tensor([text], device=target.device)
    return settings.target_law(len(prompt_ids), target.device)(target(input_ids=ids).logits[:, -1:], ids)[0, 0]


@torch.no_grad()
def _draft_law(target: Any, draft: Draft[Any], prompt_ids: list[int], text: list[int], settings: Settings) -> Tensor:
    """The law that the last token of a round is drafted from, in the round that begins after prefill's token."""
    ids = torch.tensor([text], device=target.device)
    reader = Reader(target, taps=draft.taps)
    reader.read(ids)
    place, number = torch.tensor([len(text) - 1], device=ids.device), len(text) - len(prompt_ids) - 1
    drafted = list(draft.replayed(ids, reader.tapped, place, number + 1))
    law = settings.draft_law(settings.target_law(len(prompt_ids), target.device), draft.temperatures)
    return law(drafted[min(number, len(drafted) - 1)], ids)[0, 0]
