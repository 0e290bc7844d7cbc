"""Several prompts decoded together: forwards are shared, everything else is each text's own.

A text gets what it would get alone with the same seed: the same laws, draws, draft lengths and stops. Only the order of
sums inside the shared forwards may differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from decode.batch_reader import BatchReader, right_aligned
from decode.compiled import Compiled
from decode.drafts.batched import Asked, BatchedDraft, follow, nothing
from decode.drafts.contract import Draft, Proposal
from decode.generation import Generation, Settings, device_clock, rules_for, seed_of, token_limit
from decode.kv import Clock
from decode.length import LengthPolicy
from decode.round import Rules, judge
from decode.stops import StopWatch


@dataclass
class Row:
    """One text of the batch: what is its own."""

    text: Tensor
    rules: Rules
    watch: StopWatch
    policy: LengthPolicy
    answer: Generation


@torch.no_grad()
def generate_batch_ids(
    target: Any, draft: Draft[Any] | None, prompts: Sequence[Sequence[int]], settings: Settings, tokenizer: Any = None,
    clock: Clock | None = None,
) -> list[Generation]:  # fmt: skip
    """Decode every prompt to its end. The answer of prompt i is that of `generate_ids` with seed `settings.seed` + i.

    Seconds of a round are shared out over the texts that took part, so that those of all rounds add up.
    Raises UserError as `generate_ids`, and for models whose cache forgets tokens.
    """
    if not prompts:
        return []
    if isinstance(target, Compiled):
        raise UserError("a compiled target reads one text at a time; pass the model itself")
    device = next(target.parameters()).device
    clock, first_seed = clock or device_clock(device), seed_of(settings)
    rows = [
        _row(target, draft, list(prompt), settings, first_seed + i, tokenizer, device)
        for i, prompt in enumerate(prompts)
    ]

    began = clock()
    reader = BatchReader(target, len(rows), clock, draft.taps if draft else ())
    ids, fresh = right_aligned([row.text[0].tolist() for row in rows], device)
    logits = reader.read(ids, fresh, keep=1)
    for i, row in enumerate(rows):
        first = row.rules.draws.choose(row.rules.target_law(logits[i : i + 1], row.text), row.text.shape[1])
        row.text = torch.cat([row.text, first], dim=1)
    hidden = _hidden(reader, fresh)
    following = follow(draft, [row.text for row in rows], hidden, clock) if draft else None
    took = (clock() - began) / len(rows)
    for row in rows:
        row.answer.token_ids.append(int(row.text[0, -1]))
        row.watch.keep(row.answer.token_ids)
        row.answer.prefill_s, row.answer.stopped_by = took, row.watch.reason
    active = rows
    while any(not row.answer.stopped_by for row in active):
        active = _play(active, reader, following, draft, clock)
    return [row.answer for row in rows]


def _row(
    target: Any, draft: Draft[Any] | None, prompt: list[int], settings: Settings, seed: int, tokenizer: Any,
    device: torch.device,
) -> Row:  # fmt: skip
    limit, reason = token_limit(target, prompt, settings)
    return Row(
        torch.tensor([prompt], device=device), rules_for(replace(settings, seed=seed), draft, len(prompt), device),
        StopWatch(settings.stops, prompt, limit, reason, tokenizer), settings.length_policy(), Generation(seed=seed),
    )  # fmt: skip


def _play(
    rows: Sequence[Row], reader: BatchReader, following: BatchedDraft | None, draft: Draft[Any] | None, clock: Clock
) -> list[Row]:
    """One round of those texts that have not ended, which it returns: propose, verify in one target pass, commit."""
    began = clock()
    rows = _still_going(rows, reader, following)
    proposals = _propose(rows, following, draft)
    proposed, verify_began_s = clock(), reader.forward_s
    chunks = [
        [int(row.text[0, -1]), *proposal.tokens[0].tolist()] for row, proposal in zip(rows, proposals, strict=True)
    ]
    ids, fresh = right_aligned(chunks, reader.held.device)
    logits, kept = reader.read(ids, fresh, keep=ids.shape[1]), []
    for i, (row, proposal, chunk) in enumerate(zip(rows, proposals, chunks, strict=True)):
        text = torch.cat([row.text, proposal.tokens], dim=1)
        verdict = judge(logits[i : i + 1, -len(chunk) :], text, proposal, row.rules)
        tokens = verdict.tokens[: row.watch.keep(verdict.tokens)]
        row.text = torch.cat([row.text, torch.tensor([tokens], device=row.text.device)], dim=1)
        kept.append((verdict, tokens, proposal))
    reader.rewind(torch.tensor([row.text.shape[1] - 1 for row in rows], device=reader.held.device))
    if following:
        hidden = _hidden(reader, fresh)
        committed = [None if h is None else h[:, : len(k[1])] for h, k in zip(hidden, kept, strict=True)]
        following.commit([row.text for row in rows], committed)
    shares = [seconds / len(rows) for seconds in (proposed - began, reader.forward_s - verify_began_s, clock() - began)]
    for row, (verdict, tokens, proposal) in zip(rows, kept, strict=True):
        done = verdict.as_round(tokens, shares[0], proposal.forward_s, shares[1], shares[2])
        row.policy.learn(done)
        row.answer.rounds.append(done)
        row.answer.token_ids += tokens
        row.answer.stopped_by = row.watch.reason
        row.answer.decode_s += shares[2]
    return rows


def _propose(rows: Sequence[Row], following: BatchedDraft | None, draft: Draft[Any] | None) -> list[Proposal]:
    asked = [Asked(_wanted(row, draft), row.rules.draft_law, row.rules.draws) for row in rows]
    if following is None or not any(one.tokens for one in asked):
        return [nothing(row.text) for row in rows]
    return following.propose([row.text for row in rows], asked)


def _wanted(row: Row, draft: Draft[Any] | None) -> int:
    if draft is None:
        return 0
    room = max(0, draft.context_tokens + 1 - row.text.shape[1])
    return min(row.policy.next_length(), row.watch.left - 1, room)


def _hidden(reader: BatchReader, fresh: Tensor) -> list[Tensor | None]:
    """Of each text the tapped hidden states [1, T_i, D·taps] of what it read last."""
    if reader.tapped is None:
        return [None] * len(fresh)
    return [reader.tapped[i][fresh[i]].unsqueeze(0) for i in range(len(fresh))]


def _still_going(rows: Sequence[Row], reader: BatchReader, following: BatchedDraft | None) -> list[Row]:
    """The texts that have not ended; the others leave the caches."""
    left = [i for i, row in enumerate(rows) if not row.answer.stopped_by]
    if left and len(left) < len(rows):
        chosen = torch.tensor(left, device=reader.held.device)
        reader.select(chosen)
        if following:
            following.select(chosen)
    return [rows[i] for i in left]
