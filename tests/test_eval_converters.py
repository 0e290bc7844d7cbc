"""Other tools' figures, each counted by hand on a small trace."""

import json
import re

import pytest
from conftest import CASES, ROOT

from decode.generation import Generation
from decode.trace import Round, positions
from eval.converters import (
    eagle_tau,
    gpt_fast_mean_accepted,
    in_other_words,
    spec_bench_mat,
    spec_bench_speedup,
    vllm_acceptance_rate,
    vllm_mean_length,
)
from eval.live import Arm, PromptRun
from eval.suites import Prompt


def run_of(rounds, plain_s=1.0, ours_s=1.0, plain_tokens=None):
    """An answer made of (drafted, accepted, emitted) rounds after the token of prefill."""
    trace = [
        Round(tuple(range(drafted)), accepted, tuple(range(emitted)), *[(0.5,) * drafted] * 5, 0.0, 0.0, 0.0, 0.0)
        for drafted, accepted, emitted in rounds
    ]
    ids = [0, *(token for done in trace for token in done.tokens)]
    plain = Arm([0] * (plain_tokens or len(ids)), plain_s / 4, plain_s * 3 / 4)
    ours = Arm(ids, ours_s / 4, ours_s * 3 / 4)
    return PromptRun(Prompt("x", "all", (), ""), [1], plain, ours, plain, Generation(ids, trace))


def test_every_figure_of_two_answers_counted_by_hand():
    """Rounds: 3 drafted 2 kept, 3 drafted 0 kept, none drafted; then 2 drafted 2 kept, cut before the own token."""
    runs = [run_of([(3, 2, 3), (3, 0, 1), (0, 0, 1)], 3.0, 2.0), run_of([(2, 2, 2)], 1.0, 1.0)]
    assert vllm_acceptance_rate(runs) == pytest.approx(4 / 8)
    assert vllm_mean_length(runs) == pytest.approx(1 + 4 / 3)
    assert eagle_tau(runs) == pytest.approx(1 + 4 / 4)
    assert spec_bench_mat(runs) == pytest.approx(7 / 4)
    assert gpt_fast_mean_accepted(runs) == pytest.approx(4 / 4)
    assert spec_bench_speedup(runs) == pytest.approx((6 / 2 + 3 / 1) / (6 / 3 + 3 / 1))


def test_a_published_trace_gives_the_published_figures():
    """tests/cases/S01: marks of each drafted token looked at alone, of which those after a rejection do not count."""
    case, trace = (json.loads((CASES / "S01" / f"{name}.json").read_text()) for name in ("expected", "trace"))
    rounds = []
    for given in trace["rounds"]:
        accepted = [*given["verify"], 0].index(0)
        rounds.append((given["drafted"], accepted, accepted + 1))
    runs = [run_of(rounds)]
    assert [accepted for _, accepted, _ in rounds] == case["accepted_per_round"]
    assert vllm_acceptance_rate(runs) == case["acceptance_rate"]
    assert gpt_fast_mean_accepted(runs) == case["mean_accepted_drafts_per_round"]
    assert spec_bench_mat(runs) == eagle_tau(runs) == case["tokens_per_target_pass_with_the_extra_token"]
    assert vllm_mean_length(runs) == pytest.approx(case["same_but_only_rounds_with_a_draft"])


def test_an_answer_without_rounds_or_without_drafts_divides_by_nothing():
    nothing, undrafted = [run_of([])], [run_of([(0, 0, 1)])]
    assert [figure for name, figure in in_other_words(nothing, True).items() if "speed-up" not in name] == [None] * 5
    assert vllm_acceptance_rate(undrafted) is None
    assert vllm_mean_length(undrafted) is None
    assert eagle_tau(undrafted) == spec_bench_mat(undrafted) == 1


def test_without_a_certificate_no_speed_up_is_named():
    runs = [run_of([(3, 2, 3)])]
    assert set(in_other_words(runs, True)) - set(in_other_words(runs, False)) == {"Spec-Bench speed-up"}


def test_the_worked_trace_of_the_documentation():
    """docs/measuring.md, one trace: every figure that stands there."""
    (run,) = runs = [run_of([(3, 2, 3), (3, 0, 1), (3, 3, 4), (2, 1, 1)])]
    told = {
        name: float(value)
        for name, value in re.findall(
            r"\| ([\w -]+ \S+|EAGLE τ) \| (\d\.\d\d) \|", (ROOT / "docs" / "measuring.md").read_text()
        )
    }
    counted = {name: round(value, 2) for name, value in in_other_words(runs, False).items()}
    assert told == counted
    conditional, joint = positions(run.trace.rounds)
    assert conditional == pytest.approx([3 / 4, 2 / 2, 1 / 2])
    assert joint == pytest.approx([3 / 4, 2 / 4, 1 / 3])
    assert (run.trace.tally.tau, round(run.trace.tally.accepted_share, 2)) == (2.25, 0.55)
