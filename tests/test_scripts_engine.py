"""The engine check cuts an engine's counts at the end of an answer as ours are cut, and fails when they differ."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from jobs import ROOT


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("engine_check", ROOT / "scripts" / "engine_check.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT))
    return module


@pytest.mark.parametrize(
    ("emitted", "accepted", "expected"),
    [
        # Prefill's token, then rounds: 2 drafted ones and the target's own, one and its own.
        ([1, 3, 2], 3, [(9, 2), (6, 1)]),
        # The last round accepted three, and the end token was the second of them.
        ([1, 3, 2], 5, [(9, 2), (6, 2)]),
        # The last round accepted one, which was the end.
        ([1, 1, 1], 1, [(9, 0), (8, 1)]),
        # Nothing was accepted in it: the end was the target's own.
        ([1, 1, 1], 0, [(9, 0), (8, 0)]),
        ([1], 0, []),
    ],
)
def test_what_an_engine_accepts_beyond_the_end_does_not_count(script, emitted, accepted, expected):
    assert script.vllm_rounds({"emitted": emitted, "accepted": accepted}, 10) == expected


def test_joint_acceptance_is_over_rounds_that_had_room_for_a_whole_block(script):
    rounds = [[(20, 3), (10, 0), (4, 1), (3, 3)], [(5, 2)]]
    assert script.joint(rounds) == [3 / 4, 2 / 4, 1 / 4]


def test_a_comparison_fails_by_a_position_or_by_a_text(script):
    ours = [[(20, 1), (18, 0)] * 50]
    close = [[(20, 1), (18, 0)] * 50 + [(9, 0)]]
    far = [[(20, 1), (18, 1)] * 50]
    assert script.compare("x", "lm", ours, close, 0, 1.0)["passed"]
    assert not script.compare("x", "lm", ours, far, 0, 1.0)["passed"]
    assert not script.compare("x", "lm", ours, ours, 1, 1.0)["passed"]
    assert script.compare("x", "lm", ours, ours, 0, 1.0)["largest_gap"] == 0
