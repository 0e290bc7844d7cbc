"""The planner: closed forms, fits that are known, and advice that says no."""

import json
import math

import numpy as np
import pytest
from scipy.special import expit

from configs.errors import UserError
from decode.length import Costs
from distill.pilots import learning_curve, promised
from distill.plan import Acceptance, Range, best_speedup, break_even, extrapolate, make_plan, speedup, unknown
from distill.verb_plan import plan
from eval.latency import Latency
from eval.profile_file import LatencyProfile, ShapeCost, TargetFacts

COSTS = Costs(c=0.1, o=0.05, v={1: 1.0, 2: 1.1, 3: 1.15, 4: 1.3})


def latency(scale=0.0):
    v = {n: COSTS.v[n] + scale * (n - 1) for n in COSTS.v}
    return Latency(plain_step_s=0.04 * (1 + scale), c=0.1, v=v[4], o=0.05, verify_by_width=v, intervals={})


def profile_of(batches=None, **costs):
    shapes = [
        ShapeCost(name=name, draft={"kind": "eagle3"}, c=c, c_ci=(c, c), o=0.05, weights=1, flop=10**7)
        for name, c in costs.items()
    ]
    facts = TargetFacts(
        flop=2 * 10**8, vocabulary=49152, hidden_size=576, generated_tokens_per_s=500.0, read_tokens_per_s=600.0
    )
    return LatencyProfile(
        target=facts, latency=latency(), batches=batches or {}, shapes=shapes, settings={}, provenance={}
    )


def expecting(low, middle, high, later=()):
    return Acceptance(first=Range(low=low, middle=middle, high=high), later=list(later))


def test_the_speed_up_of_given_acceptances_is_leviathans():
    a = 0.6
    assert speedup(COSTS, [a] * 3) == pytest.approx((1 - a**4) / (1 - a) / (3 * 0.1 + 1.3 + 0.05))
    assert speedup(COSTS, [0.5, 0.25]) == pytest.approx((1 + 0.5 + 0.125) / (0.2 + 1.15 + 0.05))


def test_the_best_length_is_that_of_a_scan_and_break_even_gives_a_speed_up_of_one():
    acceptance = expecting(0, 0, 1, later=[0.8])
    gamma, best = best_speedup(COSTS, acceptance, 0.7)
    scan = {n: speedup(COSTS, [0.7, *[0.56] * (n - 1)]) for n in (1, 2, 3)}
    assert (gamma, best) == (max(scan, key=scan.get), pytest.approx(max(scan.values())))
    even = break_even(COSTS, acceptance)
    assert best_speedup(COSTS, acceptance, even)[1] == pytest.approx(1.0, abs=1e-3)
    assert break_even(Costs(c=3.0, o=0.0, v=COSTS.v), acceptance) is None


def test_a_line_over_log_tokens_is_continued_with_an_honest_interval():
    def odds(tokens):
        return -4 + 0.4 * math.log(tokens)

    exact = [(n, expit(odds(n))) for n in (100, 300, 900, 2700)]
    found = extrapolate(exact, 10_000, 1.0)
    assert (found.low, found.middle, found.high) == pytest.approx([expit(odds(10_000))] * 3)
    assert extrapolate(exact, 10_000, 0.4).high == 0.4
    draws, inside = np.random.default_rng(0), 0
    for _ in range(400):
        noisy = [(n, expit(odds(n) + draws.normal(0, 0.05))) for n, _ in exact]
        truth = expit(odds(10_000) + draws.normal(0, 0.05))
        one = extrapolate(noisy, 10_000, 1.0)
        inside += one.low <= truth <= one.high
    assert 0.92 <= inside / 400 <= 0.98


def test_a_draft_that_costs_too_much_is_advised_against_before_any_training():
    found = make_plan(profile_of(big=1.2), {}, {"big": unknown(0.7)}, 10**6)
    assert found.speculate is False
    assert found.verdict.startswith("do not speculate")
    found = make_plan(profile_of(small=0.05), {"small": 0.05}, {}, 10**6)
    assert found.speculate is False
    assert "no shape can reach" in found.verdict


def test_without_pilots_a_cheap_draft_is_neither_promised_nor_refused():
    found = make_plan(profile_of(cheap=0.05, dear=0.4), {}, {}, 10**6)
    assert found.speculate is None
    assert "--pilots" in found.verdict
    assert [one.name for one in found.candidates] == ["cheap", "dear"]
    assert found.candidates[0].break_even < found.candidates[1].break_even


def test_a_pilot_decides():
    profile = profile_of(cheap=0.05, dear=0.4)
    good = make_plan(profile, {}, {"cheap": expecting(0.6, 0.65, 0.7)}, 10**6)
    assert good.speculate is True
    assert good.candidates[0].speedup.low > 1
    assert good.verdict.startswith("speculate: cheap, γ = ")
    hopeless = expecting(0.02, 0.05, 0.1)
    one_bad = make_plan(profile, {}, {"cheap": hopeless}, 10**6)
    assert one_bad.speculate is None
    assert one_bad.verdict.endswith("untried: dear")
    all_bad = make_plan(profile, {}, {"cheap": hopeless, "dear": hopeless}, 10**6)
    assert all_bad.speculate is False
    unsure = make_plan(profile, {}, {"cheap": expecting(0.05, 0.4, 0.7)}, 10**6)
    assert unsure.speculate is None
    assert "too close" in unsure.verdict


def test_rows_at_once_make_verifying_dearer_and_speculation_worth_less():
    profile = profile_of({8: latency(scale=0.4)}, cheap=0.05)
    found = make_plan(profile, {}, {"cheap": expecting(0.6, 0.65, 0.7)}, 10**6)
    assert found.by_batch[8].speedup.middle < found.by_batch[1].speedup.middle
    served = make_plan(profile, {}, {"cheap": expecting(0.6, 0.65, 0.7)}, 10**6, batch_rows=8)
    assert served.candidates[0] == found.by_batch[8]


def test_hours_and_disk_follow_the_budget():
    small, large = (make_plan(profile_of(one=0.1), {}, {}, n).candidates[0] for n in (10**6, 3 * 10**6))
    assert large.hours == pytest.approx(3 * small.hours)
    assert small.disk_gib == pytest.approx(10**6 * (64 * 4 + 4 + 2 * 3 * 576) / 2**30)
    read = 3 * 3 * 3 * 10**7 / (600 * 2 * 10**8)  # three passes, forward and backward, three unrolled steps
    assert small.hours * 3600 == pytest.approx(10**6 * (1 / 500 + 1 / 600 + read))


def test_a_learning_curve_comes_from_the_metrics_of_a_run(tmp_path):
    lines = [{"step": 0, "held_out/alpha": 0.01, "held_out/alpha_2": 0.01}]
    for step in (10, 20, 30):
        lines += [{"step": step, "tokens": step * 100, "loss": 1.0}]
        lines += [{"step": step, "held_out/alpha": 0.1 * step / 10, "held_out/alpha_2": 0.08 * step / 10}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = learning_curve(path)
    assert [point["tokens"] for point in curve] == [1000, 2000, 3000]
    assert promised(curve, 3000, 1.0).later == pytest.approx([0.8])


def test_a_plan_with_pilots_on_a_real_pair_and_again_from_its_profile(tiny_target, answers, tmp_path, capsys):
    out = tmp_path / "plan"
    plan(out, target=str(tiny_target), data=answers, budget_tokens=40_000, pilots=1, context=16, threads=1)
    made = json.loads((out / "plan.json").read_text())
    piloted = [one for one in made["candidates"] if one["piloted"]]
    assert len(piloted) == 1
    assert piloted[0] == made["candidates"][0]
    assert 0 <= piloted[0]["speedup"]["low"] <= piloted[0]["speedup"]["high"]
    assert made["verdict"] in capsys.readouterr().out
    plan(tmp_path / "elsewhere", profile=out / "profile.json", budget_tokens=40_000)
    again = json.loads((tmp_path / "elsewhere" / "plan.json").read_text())
    assert {one["name"]: one["c"] for one in again["candidates"]} == {
        one["name"]: one["c"] for one in made["candidates"]
    }


def test_what_a_plan_needs_is_asked_for(tmp_path, answers, tiny_target):
    with pytest.raises(UserError, match="needs --target"):
        plan(tmp_path)
    with pytest.raises(UserError, match="name the --target"):
        plan(tmp_path, data=answers, profile=tmp_path / "p.json")
    with pytest.raises(UserError, match="name them with --data"):
        plan(tmp_path, target=str(tiny_target), pilots=1)
    with pytest.raises(UserError, match="no such profile"):
        plan(tmp_path, profile=tmp_path / "p.json")
    with pytest.raises(UserError, match="--batch, --context: no effect with --profile"):
        plan(tmp_path, profile=tmp_path / "p.json", batch="4", context=64)
    with pytest.raises(UserError, match="--target has no effect with --profile"):
        plan(tmp_path, profile=tmp_path / "p.json", target=str(tiny_target))
