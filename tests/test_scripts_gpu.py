"""The script for one GPU does the whole of its work here too, at a tiny budget and without a GPU."""

import json
import subprocess
import sys

from jobs import ROOT, environment

import decode
from configs.records import read_records
from decode.models import load_model


def test_the_gpu_flagship_script_leaves_a_draft_that_decodes(tiny_target, tmp_path):
    command = ["scripts/gpu_flagship.sh", "--target", tiny_target, "--out", tmp_path, "--data-minutes", "0.05",
               "--train-minutes", "0.1", "--vocabulary", "120", "--answer-tokens", "16", "--rows", "8"]  # fmt: skip
    clean = environment() | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=clean, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    rows = [row for _, row in read_records(tmp_path / "rows.jsonl")]
    assert result["rows"] + 4 <= len(rows)
    assert {row["greedy"] for row in rows} == {True, False}
    assert result["steps"] > 3
    assert result["after"]["t1"]["alpha"] > result["before"]["t1"]["alpha"]
    target = load_model(str(tiny_target))
    draft = decode.load_draft(target, str(tmp_path / "draft"))
    assert draft.temperatures
    asked = {"max_new_tokens": 16, "num_draft_tokens": 3}
    answer = decode.generate(target, draft, "Who sells tea?", **asked)
    assert answer.token_ids == decode.generate(target, None, "Who sells tea?", **asked).token_ids
