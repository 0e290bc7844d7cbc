"""Losslessness, proved: the decoder's real rounds on table models, every branch summed, in float64."""

import pytest
import torch
from enumeration import exact_law, largest_difference
from tables import TableModel, random_table

from decode import round as round_module
from decode.drafts.lm import LMDraft
from decode.generate import Settings, generate
from decode.laws import Law

V, PROMPT, TOKENS = 4, [1, 2], 3
LAWS = [Law(1.0), Law(1.0, top_k=2), Law(0.7, top_p=0.8), Law(1.3, top_k=3, top_p=0.9), Law(0.0)]


def output_law(target, draft, law, num_draft_tokens, eos_ids=()):
    settings = Settings(law, TOKENS, num_draft_tokens, eos_ids)
    return exact_law(lambda draws: tuple(generate(target, draft, PROMPT, settings, draws).token_ids))


def chain_rule_law(target: TableModel, law: Law, eos_ids=()):
    """The target's law of the next tokens, worked out from its table alone."""
    laws, done = {(): 1.0}, {}
    for _ in range(TOKENS):
        longer = {}
        for text, probability in laws.items():
            before, last = ([*PROMPT, *text])[-2:]
            for token, p in enumerate(law(target.table[before, last]).tolist()):
                (done if token in eos_ids else longer)[(*text, token)] = probability * p
        laws = longer
    return {text: p for text, p in (laws | done).items() if p > 0}


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_speculative_output_follows_the_target_law_exactly(law, num_draft_tokens):
    target, draft = random_table(V, seed=1), LMDraft(random_table(V, seed=2))
    found = output_law(target, draft, law, num_draft_tokens)
    assert largest_difference(found, chain_rule_law(target, law)) < 1e-9


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_a_draft_equal_to_the_target_keeps_the_law(num_draft_tokens):
    target = random_table(V, seed=3)
    found = output_law(target, LMDraft(target), Law(1.0), num_draft_tokens)
    assert largest_difference(found, chain_rule_law(target, Law(1.0))) < 1e-9


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_a_draft_with_disjoint_support_keeps_the_law(num_draft_tokens):
    logits, impossible = torch.randn(V, V, V, generator=torch.Generator().manual_seed(4)), -torch.inf
    target_logits, draft_logits = logits.clone(), logits.flip(-1).clone()
    target_logits[..., 2:], draft_logits[..., :2] = impossible, impossible
    target = TableModel(target_logits)
    found = output_law(target, LMDraft(TableModel(draft_logits)), Law(1.0), num_draft_tokens)
    assert largest_difference(found, chain_rule_law(target, Law(1.0))) < 1e-9


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_an_end_token_inside_a_block_ends_the_answer_and_keeps_the_law(num_draft_tokens):
    target, draft = random_table(V, seed=5), LMDraft(random_table(V, seed=6))
    found = output_law(target, draft, Law(1.0), num_draft_tokens, eos_ids=(0, 3))
    assert largest_difference(found, chain_rule_law(target, Law(1.0), eos_ids=(0, 3))) < 1e-9
    assert all(set(text[:-1]).isdisjoint({0, 3}) for text in found)


def test_the_harness_catches_a_wrong_residual(monkeypatch):
    """Negative control: choosing from p instead of the residual after a rejection must show."""

    def wrong(p, q, drafted, draws):
        rows = drafted.unsqueeze(-1)
        ratio = p[:, :-1].gather(-1, rows) / q.gather(-1, rows)
        accepted = draws.accept(ratio.squeeze(-1).clamp(max=1)).long().cumprod(-1).sum(-1)
        return accepted, draws.choose(p[:, accepted.item()])

    monkeypatch.setattr(round_module, "verify_by_token", wrong)
    target, draft = random_table(V, seed=1), LMDraft(random_table(V, seed=2))
    found = output_law(target, draft, Law(1.0), 2)
    assert largest_difference(found, chain_rule_law(target, Law(1.0))) > 1e-3


def test_the_harness_catches_a_stale_draft_or_target_cache(monkeypatch):
    """Negative control: a target that is not rolled back after a rejection must show."""
    monkeypatch.setattr("decode.kv.Reader.rewind", lambda self, length: setattr(self, "length", length))
    target, draft = random_table(V, seed=1), LMDraft(random_table(V, seed=2))
    found = output_law(target, draft, Law(1.0), 2)
    assert largest_difference(found, chain_rule_law(target, Law(1.0))) > 1e-3
