"""The `evaluate` modules, loaded from the checkout without a network, on figures counted by hand."""

from pathlib import Path

import evaluate
import pytest

METRICS = Path(__file__).resolve().parent.parent / "eval" / "metrics"


def load(name):
    return evaluate.load(str(METRICS / name))


def test_acceptance_is_a_ratio_of_sums():
    assert load("acceptance").compute(predictions=[2, 0, 0], references=[3, 1, 0]) == {"acceptance_rate": 0.5}
    assert load("acceptance").compute(predictions=[0], references=[0]) == {"acceptance_rate": None}
    with pytest.raises(ValueError, match="accepted 4 of 3"):
        load("acceptance").compute(predictions=[4], references=[3])


def test_the_accepted_length_counts_the_targets_own_token_and_its_twin_does_not():
    found = load("accepted_length").compute(predictions=[2, 0, 2], references=[3, 1, 2])
    assert found == {"mean_accepted_length": 2.0, "mean_accepted_drafts": pytest.approx(4 / 3)}
    with pytest.raises(ValueError, match="cannot have emitted 4"):
        load("accepted_length").compute(predictions=[2], references=[4])


def test_the_speedup_sums_before_it_divides_and_gives_no_interval_for_few_prompts():
    metric = load("speedup")
    assert metric.compute(predictions=[1.0, 2.0], references=[3.0, 2.0])["speedup"] == pytest.approx(5 / 3)
    assert metric.compute(predictions=[1.0, 2.0], references=[3.0, 2.0])["speedup_ci"] is None
    longer = metric.compute(predictions=[1.0] * 6, references=[3.0] * 6, prediction_tokens=[2] * 6)
    assert longer["speedup"] == pytest.approx(6.0)
    assert longer["speedup_ci"] == pytest.approx([6.0, 6.0])
