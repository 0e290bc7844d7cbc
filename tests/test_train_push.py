"""A push checks the right to write first, goes on after what passes, and never gives the token away."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import ROOT, environment, run_here
from localhub import TOKEN

from configs.errors import UserError
from decode.models import load_model
from distill.build import build_eagle3_draft, save_draft
from train.publish import access
from train.publish.hub import push

REPO = "acme/a-draft"


@pytest.fixture
def draft(tiny_draft, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_draft, tmp_path / "draft"))


@pytest.fixture(scope="module")
def feature_draft(tiny_target, tmp_path_factory) -> Path:
    target = load_model(str(tiny_target), "float32")
    ids = torch.arange(0, len(target.tokenizer), 2)
    folder = tmp_path_factory.mktemp("feature") / "draft"
    save_draft(build_eagle3_draft(target.model, (1, 2, 3), ids, 0), target, "eagle3", {}, folder)
    return folder


def calls(hub, part: str) -> list[str]:
    return [call for call in hub.calls if part in call]


@pytest.mark.parametrize(
    ("path_part", "status"),
    [("/whoami", 503), ("/repos/create", 500), ("/preupload/", 429), ("/objects/batch", 502), ("/commit/", 409),
     ("/commit/", 412), ("/commit/", 504)],
)  # fmt: skip
def test_what_passes_by_itself_is_tried_again(hub, draft, path_part, status):
    hub.fail_next(path_part, status, times=2)
    push(draft, REPO)
    assert len(hub.commits(REPO)) == 1
    assert not hub.failures


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_does_not_pass_is_not_tried_again(hub, draft, status):
    hub.fail_next("/commit/", status)
    with pytest.raises(UserError, match=f"answered {status}"):
        push(draft, REPO)
    assert len(calls(hub, "/commit/")) == 1


def test_the_pause_doubles(hub, draft, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(access.time, "sleep", waits.append)
    monkeypatch.setattr(access, "FIRST_WAIT_S", 1.0)
    hub.fail_next("/repos/create", 503, times=3)
    push(draft, REPO)
    assert waits == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({"Retry-After": "7"}, 7.0), ({"Retry-After": "1.5"}, 1.5), ({"ratelimit": '"api";r=0;t=28'}, 28.0),
     ({"Retry-After": "²"}, 1.0), ({"Retry-After": "1.2.3"}, 1.0), ({"Retry-After": "99999"}, access.LONGEST_WAIT_S)],
)  # fmt: skip
def test_the_time_that_a_hub_asks_for_counts(hub, draft, monkeypatch, headers, expected):
    waits: list[float] = []
    monkeypatch.setattr(access.time, "sleep", waits.append)
    monkeypatch.setattr(access, "FIRST_WAIT_S", 1.0)
    hub.wait_headers = {k: v.encode("utf-8").decode("latin-1") for k, v in headers.items()}
    hub.fail_next("/commit/", 429)
    push(draft, REPO)
    assert waits == [expected]


def test_a_file_that_leads_out_of_the_folder_is_not_pushed(hub, draft, tmp_path):
    (tmp_path / "secret").write_text("token")
    (draft / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="LICENSE leads out of the folder"):
        push(draft, REPO)
    assert not calls(hub, "/commit/")


def test_an_index_that_leads_out_of_the_folder_is_not_pushed(hub, draft):
    (draft / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other/model.safetensors"}}')
    with pytest.raises(UserError, match="points outside of the folder"):
        push(draft, REPO)


def test_an_adapter_is_refused_as_what_to_push_before_training(job, tiny_draft, tmp_path):
    more = ["draft.layers=[0,-1]", f"draft.init={tiny_draft}", "draft.lora.rank=2", f"push_to={REPO}"]
    with pytest.raises(UserError, match="draftsmith merge"):
        run_here(job(tmp_path / "run", *more))


@pytest.mark.parametrize("endpoint", ["http://[::1", "nowhere", "ftp://hub"])
def test_an_address_that_is_none_is_named(hub, draft, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UserError, match="HF_ENDPOINT"):
        push(draft, REPO)


def test_weights_that_arrived_are_not_sent_again(hub, draft):
    hub.fail_next("/commit/", 500, times=2)
    push(draft, REPO)
    assert len([call for call in calls(hub, "/storage/") if call.startswith("PUT")]) == 1


def test_an_upload_that_was_cut_in_the_middle_goes_through(hub, draft):
    hub.cuts.append("/storage/")
    push(draft, REPO)
    assert "-> cut" in "".join(calls(hub, "/storage/"))
    assert hub.content(REPO, "model.safetensors") == (draft / "model.safetensors").read_bytes()


def test_a_large_file_goes_in_parts_and_only_the_part_that_was_cut_goes_twice(hub, draft):
    size = (draft / "model.safetensors").stat().st_size
    hub.part_bytes = size // 3
    hub.cuts.append("/2")
    push(draft, REPO)
    sent = [call.split()[1].rsplit("/", 1)[1] for call in calls(hub, "/storage/") if call.startswith("PUT")]
    assert sorted(sent) == sorted([*map(str, range(1, -(-size // (size // 3)) + 1)), "2"])
    assert hub.content(REPO, "model.safetensors") == (draft / "model.safetensors").read_bytes()


def test_a_token_that_can_only_read_is_refused_before_anything_is_sent(hub, draft):
    hub.role = "read"
    with pytest.raises(UserError, match="can only read"):
        push(draft, REPO)
    assert not calls(hub, "POST")


def test_the_right_to_write_to_an_existing_repository_is_checked_before_weights_are_sent(hub, draft):
    push(draft, REPO)
    hub.writers = False
    (draft / "training.json").write_text('{"seed": 1}')
    with pytest.raises(UserError, match=r"answered 403 .*may write to this namespace"):
        push(draft, REPO)
    assert len(calls(hub, "/preupload/")) == 1, "of the first push"


def test_a_hub_that_cannot_tell_the_right_to_write_is_left_to_answer_at_the_commit(hub, draft):
    hub.fail_next("/auth-check/", 404, times=access.TRIES)
    push(draft, REPO)
    assert len(hub.commits(REPO)) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_h01_a_refusal_comes_before_training_and_leaves_nothing_behind(hub, job, tmp_path, status):
    hub.fail_next("/repos/create", status, times=access.TRIES)
    with pytest.raises(UserError, match=f"answered {status}.*Nothing was trained yet"):
        run_here(job(tmp_path / "run", f"push_to={REPO}"))
    assert not (tmp_path / "run").exists()


def test_h01_a_failed_push_leaves_the_draft_and_another_run_only_pushes(hub, job, tmp_path):
    arguments = job(tmp_path / "run", f"push_to={REPO}", "train.steps=2")
    hub.fail_next("/commit/", 403)
    with pytest.raises(UserError, match="run again: draftsmith push") as caught:
        run_here(arguments)
    folder = tmp_path / "run/draft"
    assert str(folder) in str(caught.value)
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    assert not hub.commits(REPO)
    run_here(arguments)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights, "a finished run is not trained again"
    assert hub.content(REPO, "model.safetensors") == (folder / "model.safetensors").read_bytes()


def test_a_private_push_without_a_repository_is_refused():
    with pytest.raises(UserError, match="push_private has no effect without push_to"):
        run_here(["target=x", "push_private=true"])


@pytest.mark.parametrize("kind", ["lm", "eagle3"])
def test_a_pushed_draft_decodes_from_the_hub_at_its_revision(
    hub, tiny_target, tiny_draft, feature_draft, tmp_path, kind
):
    folder = shutil.copytree(tiny_draft if kind == "lm" else feature_draft, tmp_path / kind)
    url = push(Path(folder), REPO)
    revision = url.rsplit("/", 1)[1]
    weights = Path(folder) / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-4] + b"\0\0\0\1")
    push(Path(folder), REPO)  # another commit, which must not be the one that is read
    weights.write_bytes(kept)
    base = [sys.executable, "-m", "decode", "--target", str(tiny_target), "--prompt", "tea", "--max-new-tokens", "12"]
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    found = []
    for draft in (str(folder), f"{REPO}@{revision}"):
        done = subprocess.run(
            [*base, "--draft", draft, "--json"], capture_output=True, text=True, cwd=ROOT, env=environment() | home
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        found.append((answer["token_ids"], [r["drafted"] for r in answer["rounds"]]))
    assert found[0] == found[1]


def test_no_token_is_left_in_a_file_an_output_or_a_process_title(hub, job, tmp_path):
    """Through the whole of it: training with a push, a refusal that quotes the token, a hub that cannot be reached."""
    arguments = job(tmp_path / "run", f"push_to={REPO}", "push_private=true", "train.steps=2")
    command = [sys.executable, "-m", "distill", *arguments]
    home = environment() | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    outputs = []
    running = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=ROOT, env=home)
    titles = set()
    while running.poll() is None:
        try:
            titles.add(Path(f"/proc/{running.pid}/cmdline").read_bytes())
            running.wait(0.2)
        except (OSError, subprocess.TimeoutExpired):
            continue
    outputs += running.communicate()
    assert running.returncode == 0, outputs
    assert hub.repos[REPO].private
    again = [sys.executable, "-c", "from distill.cli import main; main()", "push", str(tmp_path / "run/draft"), REPO]
    for change in ({"HF_TOKEN": f"{TOKEN}-of-another"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        (tmp_path / "run/draft/training.json").write_text("{}")
        done = subprocess.run(again, capture_output=True, text=True, cwd=ROOT, env=home | change)
        assert done.returncode == 2
        outputs += [done.stdout, done.stderr]
    written = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    written += [p for p in (tmp_path / "hub").rglob("*") if p.is_file()]
    assert any(p.name == "README.md" for p in written)
    assert not [p for p in written if TOKEN.encode() in p.read_bytes()]
    assert not [text for text in outputs if TOKEN in text]
    assert titles
    assert not [title for title in titles if TOKEN.encode() in title]
    assert os.environ["HF_TOKEN"] == TOKEN
