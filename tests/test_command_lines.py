"""The commands as people type them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def run(*arguments):
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, cwd=ROOT, timeout=120)


def decode(*arguments):
    return run(sys.executable, "-m", "decode", *arguments)


def test_decode_prints_one_json_object_equal_with_and_without_a_draft(tiny_target, tiny_draft):
    common = ["--target", tiny_target, "--prompt", "Which clerk?", "--json", "--max-new-tokens", "20"]
    plain, drafted = decode(*common), decode(*common, "--draft", tiny_draft, "--num-draft-tokens", "4")
    assert plain.returncode == drafted.returncode == 0, plain.stderr + drafted.stderr
    plain, drafted = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"]
    assert plain["statistics"]["drafted"] == 0
    assert drafted["statistics"]["accepted"] > 0
    assert drafted["statistics"]["tau"] > 1


def test_decode_streams_with_accepted_tokens_told_apart_and_statistics_last(tiny_target, tiny_draft):
    common = ["--target", tiny_target, "--draft", tiny_draft, "--prompt", "Which clerk?", "--max-new-tokens", "20"]
    streamed, as_json = decode(*common), decode(*common, "--json")
    *_, last = streamed.stdout.strip().splitlines()
    assert "τ" in last
    assert "20 tokens" in last
    assert "‹" in streamed.stdout.removesuffix(last)
    text = streamed.stdout.rsplit("20 tokens", 1)[0].replace("‹", "").replace("›", "").strip()
    assert text.split() == json.loads(as_json.stdout)["text"].split()


def test_a_sampled_answer_repeats_with_its_seed(tiny_target, tiny_draft):
    common = ["--target", tiny_target, "--draft", tiny_draft, "--prompt", "Who?", "--temperature", "1", "--json"]
    first, second, other = (decode(*common, "--seed", seed) for seed in (1, 1, 2))
    ids = [json.loads(done.stdout)["token_ids"] for done in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]


def test_draftsmith_and_python_m_are_the_same_code(tiny_target):
    common = ["--target", tiny_target, "--prompt", "Who?", "--json", "--max-new-tokens", "5"]
    one, other = decode(*common), run(BIN / "draftsmith", "decode", *common)
    assert json.loads(one.stdout)["token_ids"] == json.loads(other.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "nowhere/at/all", "--prompt", "x"], "no such model folder"),
        (["--target", "tests", "--prompt", "x"], "no config.json"),
        (["--target", "TARGET", "--prompt", "x", "--num-draft-tokens", "3"], "no effect without --draft"),
        (["--target", "TARGET", "--draft", "TARGET", "--prompt", "x", "--num-draft-tokens", "0"], "num_draft_tokens 0"),
        (["--target", "TARGET", "--prompt", "x", "--top-k", "5"], "no effect at temperature 0"),
        (["--target", "TARGET", "--prompt", "x", "--device", "cuda"], "no accelerator"),
        (["--target", "TARGET", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens 0"),
        (["--target", "TARGET", "--prompt", "x", "--temperature", "-1"], "temperature -1"),
        (["--target", "TARGET", "--prompt", "x", "--dtype", "int3"], "dtype 'int3'"),
        (["--target", "TARGET", "--prompt", "word " * 400], "this target holds 256"),
        (["--target", "TARGET", "--prompt", "", "--raw"], "prompt is empty"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, tiny_target):
    done = decode(*[str(tiny_target) if a == "TARGET" else a for a in arguments])
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_data_writes_answers_from_the_command_line(tiny_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Who?"}\n{"prompt": "When?"}\n')
    out = tmp_path / "answers.jsonl"
    command = [BIN / "draftsmith", "data", "--target", tiny_target, "--prompts", prompts, "--out", out]
    for _ in range(2):
        done = run(*command, "data.max_new_tokens=8")
        assert done.returncode == 0, done.stderr
        assert "2 answers" in done.stdout
    assert len(out.read_text().splitlines()) == 2


def test_eval_refuses_a_draft_of_another_tokenizer_and_writes_nothing(tiny_target, tmp_path):
    from conftest import make_llama, make_tokenizer

    other = make_tokenizer("zebras zigzag through the zoo of zinc, zebras zigzag")
    make_llama(len(other), layers=1, seed=0).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    out = tmp_path / "out"
    done = run(sys.executable, "-m", "eval", "--target", tiny_target, "--draft", tmp_path / "other", "--out", out)
    assert done.returncode == 2
    assert "different tokenizers" in done.stderr
    assert not out.exists()


def test_eval_refuses_a_draft_length_below_one(tiny_target, tiny_draft, tmp_path):
    common = ["--target", tiny_target, "--draft", tiny_draft, "--out", tmp_path / "out"]
    for flag, words in (("--num-draft-tokens", "num_draft_tokens 0"), ("--max-prompts", "max_prompts")):
        done = run(sys.executable, "-m", "eval", *common, flag, 0)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
