"""Drafts without training: what they propose, and that nothing they propose changes the output's law."""

import pytest
import torch
from conftest import make_llama
from enumeration import exact_law, largest_difference
from tables import random_table

import decode
from configs.errors import UserError
from decode.drafts.kinds import draft_revision, load_draft
from decode.drafts.lm import LMDraft
from decode.drafts.lookup import LONGEST, LookupDraft, LookupOrDraft, Matches, Record
from decode.draws import SeededDraws
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.length import Auto, Costs
from decode.models import load_model
from decode.verify import VERIFIERS
from eval.replay import replay_text

V = 3
PROMPT = [1, 2, 0, 1, 2]  # its end was seen before


def proposal(ids: list[int], tokens: int, rows: int = 50) -> list[int]:
    draft = LookupDraft(rows)
    state = draft.start(torch.tensor([ids]))
    found = draft.propose(state, tokens, Law(0.0), SeededDraws(0))
    assert found.q.shape == (1, found.tokens.shape[1], rows)
    assert found.q.sum() == found.tokens.shape[1]
    assert found.q.argmax(-1).tolist() == found.tokens.tolist()
    return found.tokens[0].tolist()


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 6, [3, 4, 9, 1, 2, 3]),  # on round the loop
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the last of equally long ones
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, [3]),  # the longer one before the later one
        ([1, 2, 3, 4], 3, []),
        ([2], 3, []),
        ([9, 2, 8, 2], 3, []),  # one token is no match
    ],
)
def test_it_proposes_what_followed_the_longest_run_that_the_end_repeats(text, tokens, expected):
    assert proposal(text, tokens) == expected


def test_a_text_that_grows_token_by_token_finds_what_a_whole_one_finds():
    text = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    growing = Matches()
    for i, token in enumerate(text):
        growing.append([token])
        whole = Matches()
        whole.append(text[: i + 1])
        assert growing.longest() == whole.longest()
        length, place = growing.longest()
        seen = [
            (n, p)
            for n in range(2, LONGEST + 1)
            for p in range(n, i + 1)
            if n <= i + 1 and text[p - n : p] == text[i + 1 - n : i + 1]
        ]
        assert (length, place) == (max(seen) if seen else (0, 0))


def test_a_clone_goes_its_own_way():
    draft = LookupDraft(50)
    one = draft.start(torch.tensor([[1, 2, 3]]))
    other = one.clone()
    draft.commit(one, torch.tensor([[1, 2]]))
    assert draft.propose(other, 2, Law(0.0), SeededDraws(0)).tokens.shape[1] == 0
    assert draft.propose(one, 1, Law(0.0), SeededDraws(0)).tokens.tolist() == [[3]]


LAWS = [Law(1.0), Law(0.7, top_k=2), Law(0.0)]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("with_draft", [False, True])
def test_every_branch_of_decoding_together_has_the_targets_law(law, verifier, with_draft):
    target, lookup = random_table(V, 0), LookupDraft(V)
    draft = LookupOrDraft(lookup, LMDraft(random_table(V, 1))) if with_draft else lookup
    settings = Settings(law, 4, 1 if verifier == "match" else 2, verifier=verifier)
    found = exact_law(lambda draws: tuple(generate_ids(target, draft, PROMPT, settings, draws=draws).token_ids))
    plain = exact_law(lambda draws: tuple(generate_ids(target, None, PROMPT, settings, draws=draws).token_ids))
    assert largest_difference(found, plain) < 1e-9


@pytest.fixture(scope="module")
def target():
    return make_llama(40, layers=3, seed=5)


@pytest.mark.parametrize("gamma", [1, 3, 6, Auto(Costs(0.05, 0.02, {n: 1.0 + 0.03 * n for n in range(1, 7)}))])
@pytest.mark.parametrize("with_draft", [False, True])
def test_greedy_answers_equal_plain_ones(target, gamma, with_draft):
    lookup = LookupDraft(40)
    draft = LookupOrDraft(lookup, LMDraft(make_llama(40, layers=1, seed=5))) if with_draft else lookup
    accepted = 0
    for prompt in ([5, 9, 30, 5, 9], [7], [1, 2, 3] * 5):
        settings = Settings(Law(0.0), 60, gamma)
        drafted = generate_ids(target, draft, prompt, settings)
        assert drafted.token_ids == generate_ids(target, None, prompt, settings).token_ids
        accepted += drafted.tally.accepted
    assert accepted > 5


def test_a_sampled_answer_with_shared_noise_equals_the_plain_one(target):
    for seed in range(4):
        settings = Settings(Law(0.8), 30, 3, seed=seed, seed_exact=True)
        plain, drafted = (generate_ids(target, arm, [1, 2] * 4, settings).token_ids for arm in (None, LookupDraft(40)))
        assert plain == drafted


def test_a_record_counts_what_was_tried_and_expects_a_geometric_series():
    record = Record()
    record.learn([1, 2, 3], [1, 2, 9])
    assert (record.accepted, record.reached) == (3.0, 5.0)
    record.learn([1, 2, 3], [1, 2, 3, 4])  # all of them
    assert (record.accepted, record.reached) == (6.0, 8.0)
    record.learn([1, 2, 3], [1])  # the answer ended there
    assert (record.accepted, record.reached) == (7.0, 9.0)
    assert record.expected(3) == pytest.approx(7 / 9 + (7 / 9) ** 2 + (7 / 9) ** 3)


def test_matches_that_mislead_leave_the_word_to_the_draft(target):
    draft = LookupOrDraft(LookupDraft(40), LMDraft(target))
    state = draft.start(torch.tensor([[1, 2, 3, 1, 2]]))
    sources = []
    for _ in range(8):
        tokens = draft.propose(state, 2, Law(0.0), SeededDraws(0)).tokens[0].tolist()
        length, place = state.lookup.matches.longest()
        copied = bool(length) and tokens == state.lookup.matches.following(place, 2)
        sources.append(copied)
        wrong = (tokens[0] + 1) % 40 if copied else tokens[0]
        draft.commit(state, torch.tensor([[wrong, *([1, 2] if not copied else [])]][0:1]))
        draft.commit(state, torch.tensor([[1, 2]]))
    assert sources[0]
    assert not sources[-1]


def test_replay_gives_each_drafted_place_what_the_round_that_began_before_it_would_copy(target):
    text = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5, 1, 2]])
    places = torch.arange(4, 9)
    first, second = LookupDraft(40).replayed(text, None, places, 2)
    ids = [row.argmax().item() if row.any() else None for row in first[0]]
    # After places 4..8 the text ends in 1 | 1 2 | 2 3 | 3 5 | 5 1.
    assert ids == [None, 3, 4, None, None]
    later = [row.argmax().item() if row.any() else None for row in second[0]]
    assert later == [None, None, 4, 1, None]
    p = torch.full((5, 40), 1 / 40)
    q = (law.softmax(-1)[0] for law in (first, second))
    assert replay_text(p, q, text[0, places + 1]).number(0).overlap[0] == pytest.approx(1 / 40)


def test_a_ban_on_the_copied_token_leaves_replay_with_a_law(target):
    text, places = torch.tensor([[1, 2, 3, 1, 2]]), torch.tensor([4])
    (logits,) = LookupDraft(40).replayed(text, None, places, 1)
    banned = logits.clone()
    banned[..., logits[0, 0].argmax()] = -torch.inf
    assert torch.isfinite(banned.softmax(-1)).all()
    assert logits.softmax(-1).max() == 1


def test_a_source_that_was_passed_over_is_tried_again_after_longer_and_longer_waits():
    record = Record()
    due = [n for n in range(1, 200) if record.is_due()]
    assert due == [16, 48, 112]


def test_a_text_beyond_the_drafts_context_is_still_looked_up_in(target):
    short = LMDraft(make_llama(40, layers=1, seed=5, context=16))
    draft, settings = LookupOrDraft(LookupDraft(40), short), Settings(Law(0.0), 30, 3)
    for prompt in ([1, 2, 3] * 8, [1, 2, 3] * 3):  # beyond it from the start, and in the middle
        answer = generate_ids(target, draft, prompt, settings)
        assert answer.token_ids == generate_ids(target, None, prompt, settings).token_ids
        assert answer.tally.drafted > 0


@pytest.mark.parametrize("name", ["lookup+", "lookup+lookup", "lookup+lookup+x"])
def test_a_name_that_is_none_is_refused(tiny_target, name):
    with pytest.raises(UserError, match="a trained draft"):
        load_draft(load_model(str(tiny_target)), name)


def test_it_is_named_like_a_draft_from_the_command_line(tiny_target, tiny_draft):
    target = load_model(str(tiny_target), "float32")
    asked = {"max_new_tokens": 24, "temperature": 0}
    plain = decode.generate(target, None, "tea tea tea", **asked).token_ids
    for name in ("lookup", f"lookup+{tiny_draft}"):
        assert decode.generate(target, load_draft(target, name), "tea tea tea", **asked).token_ids == plain
    assert draft_revision("lookup") == "lookup"
    assert draft_revision(f"lookup+{tiny_draft}") == f"lookup+{draft_revision(str(tiny_draft))}"


def test_reports_have_a_row_for_each_and_lookup_is_measured_as_a_draft_too(
    measured, tiny_target, short_suite, tmp_path
):
    from measurements import settings_for

    from eval.measure import measure

    report, folder, draft = measured
    assert [point.draft for point in report.lookups] == ["lookup", "lookup+draft", "draft"]
    own = report.lookups[-1]
    some = report.prompts[: own.prompts]
    assert own.tau == pytest.approx(sum(p.emitted for p in some) / sum(p.rounds for p in some))
    page = (folder / "report.md").read_text()
    assert "## Drafts without training" in page
    assert [(point.batch, point.prompts) for point in report.batches] == [(1, 5), (3, 6)]
    assert report.batches[0].tau == pytest.approx(report.lengths[-1].tau, rel=0.5)
    assert "## Batches" in page
    assert [point.tokens for point in report.contexts] == [40, 120]
    assert report.contexts[0].verify_cost > 0.5
    assert "## Long contexts" in page
    assert report.prompt_cache.hit_rate > 0.2, "the template's opening"
    assert report.prompt_cache.prompts == len(report.prompts)
    assert "## Prompt caching" in page
    alone = measure(settings_for(tiny_target, "lookup", suite=short_suite), tmp_path / "alone")
    assert alone.verdict.lossless
    assert alone.latency.c < 0.5
    assert alone.footprint.draft_gib == 0
    assert alone.lookups == []
    both = measure(settings_for(tiny_target, f"lookup+{draft}", suite=short_suite), tmp_path / "both")
    assert both.verdict.lossless
    assert [point.draft for point in both.lookups] == ["lookup", f"lookup+{draft}"]
    assert both.training_overlap is None
