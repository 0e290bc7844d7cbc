"""A draft goes to a Hub-compatible server and comes back the same; what goes wrong says what to do."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import typer
from localhub import TOKEN, LocalHub
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from configs.errors import UserError
from train.publish.access import TRIES
from train.publish.hub import push
from train.publish.verb_push import push as push_verb

REPO = "acme/tiny-draft"
PUSHED = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "plots/gamma.svg",
    "report.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
VERDICT = {"speedup_decode": 1.5, "speedup_decode_ci": [1.4, 1.6], "tau": 2.5, "alpha": 0.6, "lossless": True}


@pytest.fixture(scope="module")
def saved_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "draft"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.draftsmith = {"kind": "lm", "target": "acme/target", "recommended_num_draft_tokens": 3}
    LlamaForCausalLM(config).save_pretrained(folder)
    words = ["<unk>", "<s>", "</s>", "Why", "is", "the", "sky", "blue", "?", *(f"w{n}" for n in range(55))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    (folder / "report.json").write_text(json.dumps({"verdict": VERDICT}))
    (folder / "training.json").write_text(json.dumps({"seed": 0}))
    (folder / "plots").mkdir()
    (folder / "plots/gamma.svg").write_text("<svg/>")
    return folder


@pytest.fixture
def draft(saved_draft: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_draft, tmp_path / "draft"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the card, which a push may write."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_pushed_draft_comes_back_with_the_same_logits(hub: LocalHub, draft: Path, tmp_path: Path) -> None:
    url = push(draft, REPO)
    back = tmp_path / "back"
    huggingface_hub.snapshot_download(REPO, endpoint=hub.url, local_dir=back, token=TOKEN)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        sent = AutoModelForCausalLM.from_pretrained(draft)(ids).logits
        received = AutoModelForCausalLM.from_pretrained(back)(ids).logits
    assert torch.equal(sent, received)
    words = PreTrainedTokenizerFast.from_pretrained(back)("the sky").input_ids
    assert words == PreTrainedTokenizerFast.from_pretrained(draft)("the sky").input_ids
    assert url == f"{hub.url}/{REPO}/commit/{hub.commits(REPO)[-1].sha}"


def test_a_push_is_one_commit_with_report_and_card(hub: LocalHub, draft: Path) -> None:
    before = contents(draft)
    push(draft, REPO)
    (commit,) = hub.commits(REPO)
    assert set(commit.files) == PUSHED
    assert sum("/commit/" in call for call in hub.calls) == 1
    assert json.loads(hub.content(REPO, "report.json"))["verdict"] == VERDICT
    assert hub.content(REPO, "README.md") == (draft / "README.md").read_bytes()
    assert b"1.50" in hub.content(REPO, "README.md")
    assert REPO.encode() in hub.content(REPO, "README.md")
    assert contents(draft) == before


def test_what_is_no_part_of_a_draft_stays_at_home(hub: LocalHub, draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in [".env", "notes.txt", "plots/raw.json", "plots/old/a.svg", "checkpoint-10/model.safetensors"]:
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).write_text("private")
    push(draft, REPO)
    assert set(hub.commits(REPO)[0].files) == PUSHED
    assert ".env, notes.txt" in caplog.text


def test_an_existing_repository_is_pushed_to_again(hub: LocalHub, draft: Path) -> None:
    first = push(draft, REPO)
    assert push(draft, REPO) == first, "nothing changed, so there is nothing to commit"
    (draft / "training.json").write_text(json.dumps({"seed": 1}))
    assert push(draft, REPO) != first
    assert len(hub.commits(REPO)) == 2
    assert json.loads(hub.content(REPO, "training.json")) == {"seed": 1}


def test_a_revision_is_a_branch_that_is_made_when_missing(hub: LocalHub, draft: Path) -> None:
    push(draft, REPO, revision="try/bf16")
    assert hub.content(REPO, "config.json", "try/bf16") == (draft / "config.json").read_bytes()
    main = hub.repos[REPO].at("main")
    assert main is not None
    assert not main.files
    (draft / "training.json").write_text("{}")
    push(draft, REPO, revision="try/bf16")
    assert hub.content(REPO, "training.json", "try/bf16") == b"{}"


def test_private_makes_the_repository_private(hub: LocalHub, draft: Path) -> None:
    push(draft, REPO, private=True)
    push(draft, "acme/open-draft")
    assert hub.repos[REPO].private
    assert not hub.repos["acme/open-draft"].private
    push(draft, REPO, private=True)


def test_private_is_refused_for_a_repository_that_is_public(hub: LocalHub, draft: Path) -> None:
    push(draft, REPO)
    (draft / "training.json").write_text("{}")
    with pytest.raises(UserError, match="exists and is public"):
        push(draft, REPO, private=True)
    assert len(hub.commits(REPO)) == 1


@pytest.mark.parametrize(
    ("path_part", "status", "advice"),
    [
        ("/api/repos/create", 401, "hf auth login"),
        ("/api/repos/create", 403, "may write to this namespace"),
        ("/api/repos/create", 500, "has trouble"),
        ("/api/validate-yaml", 502, "502"),
        ("/preupload/", 404, "spelling"),
        ("/preupload/", 403, "may write to this namespace"),
        ("/lfs/objects/batch", 403, "may write to this namespace"),
        ("/storage/", 403, "may write to this namespace"),
        ("/commit/", 401, "hf auth login"),
        ("/commit/", 404, "spelling"),
        ("/commit/", 409, "somebody else"),
        ("/commit/", 500, "has trouble"),
    ],
)
def test_a_refusal_names_repository_command_and_next_step(
    hub: LocalHub, draft: Path, path_part: str, status: int, advice: str
) -> None:
    before = contents(draft)
    hub.fail_next(path_part, status, message=f"no, not with {TOKEN}", times=TRIES)
    with pytest.raises(UserError) as caught:
        push(draft, REPO, revision="try-1", private=True)
    text = str(caught.value)
    assert text.startswith(f"{REPO}: the Hub answered {status}")
    assert advice in text
    assert text.endswith(f"run again: draftsmith push {draft} {REPO} --private --revision try-1")
    assert "\n" not in text
    assert TOKEN not in text
    assert contents(draft) == before
    assert REPO not in hub.repos or not hub.commits(REPO)
    hub.failures.clear()
    push(draft, REPO, revision="try-1", private=True)
    assert len(hub.commits(REPO)) == 1


def test_a_token_the_hub_does_not_know_is_refused(hub: LocalHub, draft: Path) -> None:
    with pytest.raises(UserError, match=r"answered 401 .*hf auth login") as caught:
        push(draft, REPO, token="hf_another-secret")
    assert "another-secret" not in str(caught.value)
    assert caught.value.__suppress_context__, "the cause may quote the token, so no traceback may show it"


def test_a_hub_that_cannot_be_reached_is_named_as_such(
    hub: LocalHub, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"can't be reached .*check the network.* run again: draftsmith"):
        push(draft, REPO)
    assert not hub.calls


@pytest.mark.parametrize("token", [None, "with space", "line\nbreak", "ümlaut"])
def test_a_missing_or_mangled_token_is_found_before_any_request(
    hub: LocalHub, draft: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"token.* run: draftsmith push") as caught:
        push(draft, REPO, token=token)
    assert token is None or token not in str(caught.value)
    assert not hub.calls


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "a.pth", "last.CKPT", "state.pkl"])
def test_pickled_weights_are_refused_by_name(hub: LocalHub, draft: Path, name: str) -> None:
    (draft / name).write_bytes(b"\x80")
    with pytest.raises(UserError, match=re.escape(name)):
        push(draft, REPO)
    assert not hub.calls


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_part_is_refused(hub: LocalHub, draft: Path, name: str) -> None:
    (draft / name).unlink()
    with pytest.raises(UserError, match=re.escape(name)):
        push(draft, REPO)
    assert not hub.calls
    assert not (draft / "README.md").exists()


def test_a_plain_model_or_a_missing_folder_is_refused(hub: LocalHub, draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    del config["draftsmith"]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a draft folder"):
        push(draft, REPO)
    with pytest.raises(UserError, match="no such folder"):
        push(draft / "nowhere", REPO)
    assert not hub.calls


def test_weights_that_were_cut_short_are_refused(hub: LocalHub, draft: Path) -> None:
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        push(draft, REPO)
    assert not hub.calls


def test_sharded_weights_are_pushed_when_every_shard_is_there(hub: LocalHub, draft: Path) -> None:
    (draft / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(draft))
    block = model.config.draftsmith
    model.save_pretrained(draft, max_shard_size="4KB")
    assert json.loads((draft / "config.json").read_text())["draftsmith"] == block
    push(draft, REPO)
    shards = {path.name for path in draft.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert {*shards, "model.safetensors.index.json"} <= set(hub.commits(REPO)[0].files)
    sorted(draft.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(UserError, match="model-00001"):
        push(draft, REPO)


@pytest.mark.parametrize("repo_id", ["tiny-draft", "a/b/c", "acme/dr aft", "acme/-draft", ""])
def test_a_name_that_is_not_name_slash_repo_is_refused(hub: LocalHub, draft: Path, repo_id: str) -> None:
    with pytest.raises(UserError, match="expected NAME/REPO"):
        push(draft, repo_id)
    assert not hub.calls


def test_the_python_example_of_the_card_runs(hub: LocalHub, draft: Path) -> None:
    push(draft, REPO)
    (example,) = re.findall(r"```python\n(.*?)```", (draft / "README.md").read_text(), re.DOTALL)
    here = example.replace(f'"{REPO}"', repr(str(draft))).replace('"acme/target"', repr(str(draft)))
    names: dict[str, object] = {}
    exec(here, names)
    output = names["output"]
    assert isinstance(output, torch.Tensor)
    assert output.shape[1] > 6
    assert names["draft"].generation_config.num_assistant_tokens == 3  # type: ignore[attr-defined]


def test_the_verb_prints_the_commit_and_writes_the_card(hub: LocalHub, draft: Path) -> None:
    app = typer.Typer()
    app.command("push")(push_verb)
    result = CliRunner().invoke(app, [str(draft), REPO, "--private", "--revision", "main"])
    assert result.exit_code == 0, result.output
    assert f"{hub.url}/{REPO}/commit/{hub.commits(REPO)[0].sha}" in result.output
    assert hub.repos[REPO].private
    assert (draft / "README.md").is_file()


def test_the_verb_imports_nothing_heavy_before_it_runs() -> None:
    code = "import sys, train.publish.verb_push; print({'torch', 'huggingface_hub'} & set(sys.modules))"
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "set()"
