"""Two reports side by side: figures by hand, paired intervals, gates and their exit code."""

import pytest

from configs.errors import UserError
from eval.comparison import compare, failed_gates, read_report
from eval.figures import ArmFigures, PromptFigures
from eval.report import Report, Verdict


def prompt(i, ours_s, rounds=8, overlap=4.0):
    arms = {"plain": (17, 1.0 + i, 2.0 + i), "speculative": (17, 1.0 + i, ours_s), "hf": (17, 1.0 + i, 2.0 + i)}
    named = {name: ArmFigures(tokens=n, prefill_s=a, decode_s=b) for name, (n, a, b) in arms.items()}
    counts = {"rounds": rounds, "drafted": 20, "accepted": 16 - rounds, "emitted": 16, "repeated_tokens": 0}
    return PromptFigures(id=str(i), category="a", **named, **counts, overlap=overlap, places=16)


def report(prompts, speedup=None, alpha=0.25, lossless=True, **settings):
    """The parts of a report that a comparison reads."""
    none = dict.fromkeys(Verdict.model_fields) | {"line": "", "tau": 2.0, "alpha": alpha, "lossless": lossless}
    verdict = Verdict(**none | {"speedup_decode": speedup})
    return Report.model_construct(verdict=verdict, prompts=prompts, settings={"temperature": 0.0} | settings)


def test_what_changed_is_counted_from_the_prompts_of_both_with_paired_intervals():
    before = report([prompt(i, ours_s=2.0 + i) for i in range(6)])
    after = report([prompt(i, ours_s=(2.0 + i) / 2, rounds=4, overlap=6.0) for i in range(6)])
    alpha, tau, speedup = compare(before, after)
    assert (alpha.before, alpha.after) == (4 / 16, 6 / 16)
    assert (tau.before, tau.after) == (2.0, 4.0)
    assert (speedup.before, speedup.after) == (pytest.approx(1.0), pytest.approx(2.0))
    # Every prompt changed by the same factor, however long it took: pairs leave no doubt.
    assert speedup.difference_ci == pytest.approx((1.0, 1.0))


def test_few_prompts_have_no_interval_and_a_failed_certificate_no_speedup():
    changes = compare(report([prompt(0, 1.0)]), report([prompt(0, 2.0)], lossless=False))
    assert [change.name for change in changes] == ["α", "τ"]
    assert all(change.difference_ci is None for change in changes)


def test_prompts_that_say_nothing_are_left_out():
    empty = prompt(9, 1.0, rounds=0).model_copy(update={"emitted": 0, "overlap": 0.0, "places": 0})
    empty.speculative.tokens = empty.plain.tokens = 1
    rows = [*(prompt(i, 1.0) for i in range(4)), *(empty.model_copy(update={"id": f"e{i}"}) for i in range(4))]
    for change in compare(report(rows), report(rows)):
        assert change.before == change.after
        assert change.difference_ci is None  # four prompts are too few
    assert compare(report([empty]), report([empty])) == []


def test_reports_of_other_prompts_or_laws_are_not_compared():
    one = report([prompt(0, 1.0), prompt(1, 1.0)])
    for other in (report([prompt(0, 1.0)]), report([prompt(0, 1.0), prompt(2, 1.0)])):
        with pytest.raises(UserError, match="different prompts"):
            compare(one, other)
    with pytest.raises(UserError, match="different temperature"):
        compare(one, report(one.prompts, temperature=1.0))


def test_gates_fail_by_name():
    before = report([], speedup=1.4, alpha=0.30)
    after = report([], speedup=1.1, alpha=0.28)
    assert failed_gates(before, after, None, None) == []
    assert failed_gates(before, after, 1.0, 0.03) == []
    speed, drop = failed_gates(before, after, 1.2, 0.01)
    assert "S_decode 1.100 is below 1.2" in speed
    assert "α fell by 0.020" in drop
    assert "certificate" in failed_gates(before, report([], alpha=0.3, lossless=False), None, None)[0]


def test_a_report_that_is_none_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match="not a report of this version"):
        read_report(tmp_path / "a.json")
    with pytest.raises(UserError, match="no such report"):
        read_report(tmp_path / "b.json")
