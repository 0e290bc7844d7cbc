"""Losslessness, proved: the decoder's real rounds on table models, every branch summed, in float64."""

from dataclasses import replace

import pytest
import torch
from enumeration import exact_law, largest_difference
from tables import TableModel, random_table

from decode import generation
from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids, stream_ids
from decode.laws import Law
from decode.length import Auto, Costs
from decode.processors import Penalties
from decode.round import play_round
from decode.stops import Stops
from decode.trace import Tally
from decode.verify import VERIFIERS

V, PROMPT = 3, [1, 2]
# One entry an option family; every verifier is proved under each.
FAMILIES = {
    "plain sampling": Settings(Law(1.0)),
    "greedy": Settings(Law(0.0)),
    "temperature": Settings(Law(0.4)),
    "near zero temperature": Settings(Law(1e-6)),
    "top-k": Settings(Law(1.0, top_k=2)),
    "temperature and top-p": Settings(Law(0.7, top_p=0.8)),
    "top-k and top-p": Settings(Law(1.3, top_k=2, top_p=0.9)),
    "min-p": Settings(Law(1.0, min_p=0.4)),
    "repetition penalty": Settings(Law(1.0), penalties=Penalties(repetition_penalty=2.5)),
    "presence and frequency": Settings(Law(0.9), penalties=Penalties(presence_penalty=1.0, frequency_penalty=0.7)),
    "no repeated trigram": Settings(Law(1.0), penalties=Penalties(no_repeat_ngram_size=3)),
    "bad words": Settings(Law(1.0), penalties=Penalties(bad_words_ids=((2, 0), (1,)))),
    "logit bias": Settings(Law(1.0), penalties=Penalties(logit_bias={0: 1.5, 2: -1.0})),
    "end tokens": Settings(Law(1.0), stops=Stops((0,))),
    "min new tokens": Settings(Law(1.0), stops=Stops((0,)), penalties=Penalties(min_new_tokens=2)),
    "greedy with penalties": Settings(Law(0.0), penalties=Penalties(repetition_penalty=1.8, no_repeat_ngram_size=3)),
    "draft at another temperature": Settings(Law(0.8), draft_temperature=2.0),
    "greedy draft under a sampling target": Settings(Law(1.0), draft_temperature=0.0),
    "greedy draft under a filtered target": Settings(Law(0.9, top_k=2), draft_temperature=0.0),
}


def output_law(target, draft, settings):
    return exact_law(lambda draws: tuple(generate_ids(target, LMDraft(draft), PROMPT, settings, draws=draws).token_ids))


def chain_rule_law(target: TableModel, settings: Settings):
    """The target's law of the next tokens, worked out from its table alone, place by place."""
    eos_ids = settings.stops.eos_ids
    processors = settings.penalties.processors(len(PROMPT), eos_ids, torch.device("cpu"))
    law = replace(settings.law, processors=processors)
    open_texts, done = {(): 1.0}, {}
    for _ in range(settings.max_new_tokens):
        longer = {}
        for text, probability in open_texts.items():
            whole = [*PROMPT, *text]
            row = law(target.table[whole[-2], whole[-1]].view(1, 1, -1), torch.tensor([whole]))[0, 0]
            for token, p in enumerate(row.tolist()):
                (done if token in eos_ids else longer)[(*text, token)] = probability * p
        open_texts = longer
    return {text: p for text, p in (open_texts | done).items() if p > 0}


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_output_follows_the_target_law_exactly(family, verifier):
    """γ + 2 tokens, so that a round of the whole γ is played: the last token a limit allows is never drafted."""
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    for num_draft_tokens in (1,) if verifier == "match" else (1, 2):
        settings = replace(
            FAMILIES[family], verifier=verifier, num_draft_tokens=num_draft_tokens, max_new_tokens=num_draft_tokens + 2
        )
        found = output_law(target, draft, settings)
        assert largest_difference(found, chain_rule_law(target, settings)) < 1e-9


@pytest.mark.parametrize("law", [Law(1.0), Law(0.8, top_p=0.7), Law(1.5, top_k=1)], ids=str)
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_blocks_of_three_keep_the_law(law, verifier):
    """Two tokens in the vocabulary, so that blocks of three can be summed whole."""
    prompt_in_range = random_table(3, seed=1).table[:, :, :2], random_table(3, seed=2).table[:, :, :2]
    target, draft = (TableModel(torch.cat([t, torch.full_like(t[..., :1], -torch.inf)], -1)) for t in prompt_in_range)
    settings = Settings(law, max_new_tokens=5, num_draft_tokens=3, verifier=verifier)
    assert largest_difference(output_law(target, draft, settings), chain_rule_law(target, settings)) < 1e-9
    same = output_law(target, target, replace(settings, max_new_tokens=4))
    assert largest_difference(same, chain_rule_law(target, replace(settings, max_new_tokens=4))) < 1e-9


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_several_rounds_of_a_larger_vocabulary_keep_the_law(verifier):
    target, draft = random_table(4, seed=5), random_table(4, seed=6)
    tokens = 3 if verifier == "match" else 4
    settings = Settings(Law(1.0), max_new_tokens=tokens, num_draft_tokens=1, verifier=verifier)
    assert largest_difference(output_law(target, draft, settings), chain_rule_law(target, settings)) < 1e-9


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_equal_to_the_target_keeps_the_law(verifier):
    target = random_table(V, seed=3)
    settings = Settings(Law(1.0), max_new_tokens=3, num_draft_tokens=2, verifier=verifier)
    assert largest_difference(output_law(target, target, settings), chain_rule_law(target, settings)) < 1e-9


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_with_disjoint_support_keeps_the_law(verifier):
    logits = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(4))
    target_logits, draft_logits = logits.clone(), logits.flip(-1).clone()
    target_logits[..., 2:], draft_logits[..., :2] = -torch.inf, -torch.inf
    target, draft = TableModel(target_logits), TableModel(draft_logits)
    num_draft_tokens = 1 if verifier == "match" else 2
    settings = Settings(Law(1.0), max_new_tokens=4, num_draft_tokens=num_draft_tokens, verifier=verifier)
    assert largest_difference(output_law(target, draft, settings), chain_rule_law(target, settings)) < 1e-9


def expected_accepted(target, draft, verifier, num_draft_tokens):
    """Mean accepted of the first round, over every branch of it."""
    settings = Settings(
        Law(1.0), max_new_tokens=num_draft_tokens + 2, num_draft_tokens=num_draft_tokens, verifier=verifier
    )

    def first_round(draws):
        growing = stream_ids(target, LMDraft(draft), PROMPT, settings, draws=draws)
        next(growing)  # prefill
        return (next(growing).rounds[0].accepted,)

    return sum(accepted * p for (accepted,), p in exact_law(first_round).items())


@pytest.mark.parametrize("seed", range(5))
def test_block_accepts_at_least_as_much_as_token_and_token_as_match(seed):
    target, draft = random_table(V, seed=10 + seed), random_table(V, seed=20 + seed)
    block, token, match = (expected_accepted(target, draft, name, 2) for name in ("block", "token", "match"))
    assert block >= token - 1e-12
    assert token >= match - 1e-12
    assert block > match


def test_a_length_policy_that_learns_within_the_call_keeps_the_law():
    """`auto` looks at finished rounds only, so what it decides cannot lean on the tokens it decides about."""
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    auto = Auto(Costs(c=0.1, o=0.05, v={1: 1.0, 2: 1.1, 3: 1.2}), prior=0.55, prior_rounds=0.5)
    settings = Settings(Law(1.0), max_new_tokens=5, num_draft_tokens=auto, verifier="token")
    lengths = set()

    def program(draws):
        answer = generate_ids(target, LMDraft(draft), PROMPT, settings, draws=draws)
        lengths.update(len(r.drafted) for r in answer.rounds)
        return tuple(answer.token_ids)

    assert largest_difference(exact_law(program), chain_rule_law(target, settings)) < 1e-9
    assert len(lengths) > 1


def test_the_harness_catches_a_policy_that_drops_a_token_for_its_own_low_probability(monkeypatch):
    """Negative control: a length that depends on the drafted token's own value is not lossless."""

    class Peeking(LMDraft):
        def propose(self, state, num_tokens, law, draws):
            proposal = super().propose(state, num_tokens, law, draws)
            q = proposal.q.gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)[0].tolist()
            keep = next((i for i, value in enumerate(q) if value < 0.3), num_tokens)
            return replace(proposal, tokens=proposal.tokens[:, :keep], q=proposal.q[:, :keep])

    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    settings = Settings(Law(1.0), max_new_tokens=4, num_draft_tokens=2, verifier="token")
    found = exact_law(
        lambda draws: tuple(generate_ids(target, Peeking(draft), PROMPT, settings, draws=draws).token_ids)
    )
    assert largest_difference(found, chain_rule_law(target, settings)) > 1e-3


def wrong_residual(p, q, drafted, draws, position):
    """Chooses from p instead of the residual after a rejection."""
    ratio = p[:, :-1].gather(-1, drafted.unsqueeze(-1)) / q.gather(-1, drafted.unsqueeze(-1))
    accepted = draws.accept(ratio.squeeze(-1).clamp(max=1)).long().cumprod(-1).sum(-1)
    return accepted, draws.choose(p[:, accepted.item()][:, None], position)[:, 0]


def weight_as_chance(p, q, drafted, draws, position):
    """Block verification that accepts a prefix with w_i instead of h_i: a mistake others have made."""
    ratio = (p[:, :-1].gather(-1, drafted.unsqueeze(-1)) / q.gather(-1, drafted.unsqueeze(-1))).squeeze(-1)
    w = torch.ones_like(ratio[:, :1])
    if not ratio.shape[1]:
        return wrong_residual(p, q, drafted, draws, position)
    for i in range(ratio.shape[1]):
        w = torch.cat([w, (w[:, -1:] * ratio[:, i : i + 1]).clamp(max=1)], dim=1)
    accepted = (draws.accept(w[:, 1:]).long() * torch.arange(1, w.shape[1])).amax(-1)
    row = p[:, accepted.item()].clone()
    if accepted.item() < drafted.shape[1]:
        row = (w[:, accepted.item(), None] * row - q[:, accepted.item()]).clamp(min=0)
        row = row if row.sum() > 0 else p[:, accepted.item()]
    return accepted, draws.choose(row[:, None], position)[:, 0]


@pytest.mark.parametrize("wrong", [wrong_residual, weight_as_chance])
def test_the_harness_catches_a_wrong_verifier(monkeypatch, wrong):
    """Negative controls."""
    monkeypatch.setitem(VERIFIERS, "token", wrong)
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    settings = Settings(Law(1.0), max_new_tokens=4, num_draft_tokens=2, verifier="token")
    assert largest_difference(output_law(target, draft, settings), chain_rule_law(target, settings)) > 1e-3


def test_the_harness_catches_a_stale_cache(monkeypatch):
    """Negative control: a target that is not rolled back after a rejection must show."""
    monkeypatch.setattr("decode.kv.Reader.rewind", lambda self, length: setattr(self, "length", length))
    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    settings = Settings(Law(1.0), max_new_tokens=4, num_draft_tokens=2)
    assert largest_difference(output_law(target, draft, settings), chain_rule_law(target, settings)) > 1e-3


def test_the_harness_catches_a_penalty_that_sees_the_whole_block(monkeypatch):
    """Negative control: processors applied once, with the prefix of the last place, must show."""

    def once(self, logits, text):
        rows = [logits[:, place].clone() for place in range(logits.shape[-2])]
        for processor in self.processors:
            rows = [processor(text, row) for row in rows]
        return torch.stack(rows, dim=1)

    target, draft = random_table(V, seed=1), random_table(V, seed=2)
    settings = Settings(
        Law(1.0), max_new_tokens=4, num_draft_tokens=2, penalties=Penalties(repetition_penalty=2.5), verifier="token"
    )
    expected = chain_rule_law(target, settings)
    monkeypatch.setattr(Law, "_process", once)
    assert largest_difference(output_law(target, draft, settings), expected) > 1e-3


def test_harness_and_real_models_play_the_same_round():
    """The proof is about the code that decodes: there is one round."""
    assert generation.play_round is play_round


def test_counts_add_up_on_every_branch():
    """Σ emitted = answer − prefill token, 0 ≤ accepted ≤ drafted, on every branch of every verifier."""
    target, draft = random_table(V, seed=7), random_table(V, seed=8)
    for verifier in VERIFIERS:
        settings = Settings(Law(1.0), max_new_tokens=3, num_draft_tokens=2, verifier=verifier, stops=Stops((0,)))

        def program(draws, settings=settings):
            answer = generate_ids(target, LMDraft(draft), PROMPT, settings, draws=draws)
            tally = Tally.of(answer.rounds)
            assert tally.emitted == len(answer.token_ids) - 1
            assert 0 <= tally.accepted <= tally.drafted
            assert 0 not in answer.token_ids[:-1]
            return tuple(answer.token_ids)

        assert sum(exact_law(program).values()) == pytest.approx(1.0)
