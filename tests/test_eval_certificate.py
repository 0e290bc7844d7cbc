"""A certificate that can fail, and the arms that it compares."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CASES

from decode.drafts.lm import LMDraft
from decode.generation import Settings, generate_ids
from decode.laws import Law
from decode.models import load_model
from decode.stops import Stops
from decode.verify import VERIFIERS
from eval.certificate import certify, divergences
from eval.live import Arm, hf_arm, run_prompt
from eval.suites import Prompt
from eval.text import first_difference

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pair(tiny_target, tiny_draft):
    return load_model(str(tiny_target)), load_model(str(tiny_draft))


def prompt_runs(pair, settings, count=3):
    target, draft = pair
    return [
        run_prompt(target, LMDraft(draft.model), Prompt(str(i), "a", (), ""), [5 + i, 9, 30], settings, 1, first=i)
        for i in range(count)
    ]


def test_a_decoder_that_accepts_too_much_fails_the_certificate(pair, monkeypatch):
    """Negative control: accepting every draft changes the text, and the certificate must see it."""
    target, draft = pair
    settings = Settings(max_new_tokens=20)

    def accept_all(p, q, drafted, draws, position):
        accepted = torch.full((1,), drafted.shape[1])
        return accepted, p[:, -1].argmax(-1)

    monkeypatch.setitem(VERIFIERS, "block", accept_all)
    certificate = certify(target, LMDraft(draft.model), prompt_runs(pair, settings), settings, 3, 3, 12, 0)
    assert not certificate.passed
    assert certificate.fp32_failures
    assert certificate.run_dtype_failures


def test_a_failed_certificate_claims_no_speedup_and_exits_with_3(tiny_target, tiny_draft, short_suite, tmp_path):
    code = (
        "import sys, torch\nfrom decode.verify import VERIFIERS\n"
        "VERIFIERS['block'] = lambda p, q, x, draws, at: (torch.full((1,), x.shape[1]), p[:, -1].argmax(-1))\n"
        "from configs.command_line import run_verb\nfrom eval.verb_eval import evaluate\nrun_verb(evaluate)"
    )
    out = tmp_path / "out"
    arguments = ["--target", tiny_target, "--draft", tiny_draft, "--out", out, "--suite", short_suite,
                 "--max-prompts", "2", "--max-new-tokens", "12", "--threads", "1"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert "NOT LOSSLESS" in done.stdout
    verdict = json.loads((out / "report.json").read_text())["verdict"]
    assert verdict["lossless"] is False
    assert verdict["speedup_decode"] is None


def test_s06_a_greedy_answer_that_ends_too_early_is_shown_and_no_speedup_is_claimed(pair):
    """tests/cases/S06: the faster run stopped after 40 tokens where the plain one went on to its 64."""
    target, draft = pair
    case = json.loads((CASES / "S06" / "scenario.json").read_text())
    ended, plain_tokens = (case[name][0]["tokens"] for name in ("spec_bad", "plain"))
    settings = Settings(Law(0.0), max_new_tokens=plain_tokens, num_draft_tokens=3)
    (run,) = prompt_runs(pair, settings, count=1)
    short = [*run.plain.token_ids[: ended - 1], target.eos_ids[0]]
    bad = replace(run, trace=replace(run.trace, token_ids=short), speculative=Arm(short, 0.1, 0.1))
    certificate = certify(target, LMDraft(draft.model), [bad], settings, 3, 1, 8, 0)
    assert not certificate.passed
    (difference,) = divergences(target.model, [bad], settings)
    assert (difference.differs_from_plain_at, difference.numeric_tie) == (ended - 1, False)


def test_tokens_after_a_stop_fail_the_certificate(pair):
    target, draft = pair
    settings = Settings(max_new_tokens=8)
    runs = prompt_runs(pair, settings, 1)
    stop = Settings(max_new_tokens=8, stops=Stops((runs[0].trace.token_ids[3],)))
    certificate = certify(target, LMDraft(draft.model), runs, stop, 3, 1, 8, 0)
    assert certificate.tokens_after_stop == 8 - 1 - runs[0].trace.token_ids.index(stop.stops.eos_ids[0])
    assert not certificate.passed


def test_hf_generate_and_our_plain_loop_write_the_same_text(pair):
    target, _ = pair
    settings = Settings(max_new_tokens=15)
    arm = hf_arm(target, [5, 9, 30], settings)
    assert arm.token_ids == generate_ids(target.model, None, [5, 9, 30], settings).token_ids
    assert arm.prefill_s > 0
    assert arm.decode_s > 0


def test_hf_generate_samples_without_touching_the_global_random_state(pair):
    before = torch.random.get_rng_state()
    arm = hf_arm(pair[0], [5, 9], Settings(Law(1.0, top_k=5), max_new_tokens=5, seed=1))
    assert len(arm.token_ids) == 5
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_first_difference_counts_a_missing_token():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
