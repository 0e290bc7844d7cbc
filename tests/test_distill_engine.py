"""The target behind a server: the same answers and the same cache as from one in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from localengine import LocalEngine, serving

from configs.errors import UserError
from decode.laws import Law
from decode.models import describe_model, load_model
from distill import engine as engine_module
from distill.answers import DataSettings, sample, write_answers
from distill.engine import Engine
from distill.logit_cache import scored_by
from distill.rows import Row
from distill.teacher import Teacher

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [[17, 40, 3], [9], [5, 6, 7, 8, 30]]
ROWS = [Row([17, 40, 3, 9, 30, 41], [False, False, True, True, True, True]), Row([5, 6, 7], [False, False, True])]


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_model(str(tiny_target))


def test_answers_are_the_token_ids_of_the_server(target):
    with serving(LocalEngine(target.model, target.eos_ids)) as local:
        engine = Engine([local.url], "tiny")
        assert engine.answer(PROMPTS, Law(), 12, 0, range(9)) == sample(target, PROMPTS, Law(), 12, seed=0)
        sampled = [engine.answer(PROMPTS, Law(1.0), 12, seed, range(9)) for seed in (3, 3, 4)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert {request["model"] for request in local.requests} == {"tiny"}
    assert all(request["return_token_ids"] for request in local.requests)
    assert sorted(request["seed"] for request in local.requests[3:6]) == [3, 4, 5]


def test_scores_are_those_of_a_teacher_in_this_process(target):
    with serving(LocalEngine(target.model)) as local:
        found, _ = Engine([local.url], "tiny").score(ROWS, 8)
    expected = scored_by(Teacher(target.model))(ROWS, 8, ())[0]
    assert torch.equal(found.top_ids, expected.top_ids)
    torch.testing.assert_close(found.top_logp, expected.top_logp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.tail, expected.tail, atol=1e-5, rtol=1e-4)


def test_several_servers_share_the_requests_and_no_more_than_allowed_are_under_way(target):
    with serving(LocalEngine(target.model)) as one, serving(LocalEngine(target.model)) as other:
        engine = Engine([one.url, other.url], "tiny", concurrency=2)
        answers = engine.answer(PROMPTS * 3, Law(), 6, 0, range(99))
        assert answers == sample(target, PROMPTS * 3, Law(), 6, seed=0)
    assert {len(one.requests), len(other.requests)} == {4, 5}
    assert one.most_under_way + other.most_under_way <= 4
    assert max(one.most_under_way, other.most_under_way) <= 2


def test_a_busy_server_is_asked_again(target):
    with serving(LocalEngine(target.model, fail_first=2)) as local:
        assert len(Engine([local.url], "tiny", concurrency=1).answer([[5, 6]], Law(), 4, 0, range(9))[0]) == 4
    assert len(local.requests) == 3


def test_what_a_server_cannot_do_is_said_in_one_line(target, monkeypatch):
    with serving(LocalEngine(target.model, gives=(), most_logprobs=4)) as local:
        engine = Engine([local.url], "tiny")
        with pytest.raises(UserError, match="answers without token_ids"):
            engine.answer([[5, 6]], Law(), 4, 0, range(9))
        asked = local.requests[0]  # nothing is left to the model's own generation config
        assert {asked[name] for name in ("min_p", "presence_penalty", "frequency_penalty")} == {0.0}
        assert (asked["repetition_penalty"], asked["top_k"], asked["top_p"]) == (1.0, -1, 1.0)
        with pytest.raises(UserError, match="gives no prompt_logprobs"):
            engine.score(ROWS, 4)
        with pytest.raises(UserError, match=r"refused with 400 \(Requested prompt logprobs of 8"):
            engine.score(ROWS, 8)
    with pytest.raises(UserError, match="no hidden states"):
        engine.score(ROWS, 4, taps=(1,))
    monkeypatch.setattr(engine_module, "RETRIES", 0)
    with pytest.raises(UserError, match="no answer after 0 retries"):
        engine.answer([[5, 6]], Law(), 4, 0, range(9))


def test_data_from_a_server_needs_no_weights_here_and_resumes_by_row(target, tiny_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Who is {n}?"}) + "\n" for n in range(6)))
    settings = DataSettings(
        answers=tmp_path / "a.jsonl", prompts=str(prompts), max_new_tokens=8, batch_rows=2, temperature=0.0
    )
    described = describe_model(str(tiny_target))
    assert described.eos_ids == target.eos_ids
    assert described.revision == target.revision
    with serving(LocalEngine(target.model, target.eos_ids)) as local:
        engine = Engine([local.url], "tiny")
        assert write_answers(described, settings, 0, engine) == 6
        lines = settings.answers.read_text().splitlines(keepends=True)
        settings.answers.write_text("".join(lines[:4]) + lines[4][:9])
        assert write_answers(described, settings, 0, engine) == 6
        assert len(local.requests) == 8
    assert settings.answers.read_text() == "".join(lines)
    here = settings.model_copy(update={"answers": tmp_path / "b.jsonl"})
    write_answers(target, here, 0)
    assert answer_ids(settings.answers) == answer_ids(here.answers)
    with pytest.raises(UserError, match=r"another settings\.answered_by"):
        write_answers(target, settings, 0)


def answer_ids(path):
    return [json.loads(line)["answer_ids"] for line in path.read_text().splitlines()]


def test_the_command_lets_the_server_answer_and_score(target, tiny_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Who is {n}?"}) + "\n" for n in range(4)))
    out, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    with serving(LocalEngine(target.model, target.eos_ids)) as local:
        at = ["--endpoint", local.url, "--served-model", "tiny"]
        run("data", "--target", tiny_target, "--prompts", prompts, "--out", out, "--max-new-tokens", "8", *at)
        assert [len(request["prompt"]) > 0 and request["max_tokens"] for request in local.requests] == [8] * 4
        settings = [f"target={tiny_target}", f"data.answers={out}", f"cache.folder={cache}", "cache.top_k=8"]
        said = run("data", "cache", *settings, *at)
        assert "bytes per supervised token" in said
        assert [request.get("prompt_logprobs") for request in local.requests[4:]] == [8] * 4
    here = run("data", "cache", *settings[:2], f"cache.folder={tmp_path / 'here'}", "cache.top_k=8")
    assert here.splitlines()[-1].split(": ")[1] == said.splitlines()[-1].split(": ")[1]


def run(*arguments) -> str:
    command = [Path(sys.executable).parent / "draftsmith", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
