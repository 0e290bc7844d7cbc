"""Going on from a draft that there is: whole, by an adapter, for a target that was fine-tuned."""

import json
import shutil

import pytest
import torch
from conftest import make_llama
from jobs import losses, metrics, run_decode, run_here
from safetensors.torch import load_file, save_file

from configs.errors import UserError
from decode.drafts.kinds import draft_revision, load_draft
from decode.models import load_model
from distill.answers import DataSettings, write_answers
from distill.build import build_lm_draft, save_draft
from distill.shape import warm_start
from distill.verb_distill import distill
from train.publish.merge import merge

NO_SHAPE = "draft.layers=[0,-1]"  # the default


@pytest.fixture(scope="session")
def base(job, tmp_path_factory):
    """A finished run of a feature draft with a trimmed head."""
    output = tmp_path_factory.mktemp("runs") / "base"
    run_here(job(output, "draft.vocabulary=200", kind="eagle3"))
    return output


def from_draft(job, output, draft, *more):
    return run_here(job(output, NO_SHAPE, *warm_start(str(draft)), *more))


def test_a_run_goes_on_from_a_draft_of_either_kind_and_measures_it_before_and_after(base, job, tmp_path):
    draft = from_draft(job, tmp_path / "on", base / "draft")
    assert losses(tmp_path / "on")[0] < 0.9 * losses(base)[0]
    before = metrics(tmp_path / "on")[0]["held_out/tau"]
    assert before == pytest.approx(max(row.get("held_out/tau", 0) for row in metrics(base)), rel=1e-5)
    assert json.loads((draft / "training.json").read_text())["measured"]["tau_before"] == before
    kept = load_file(draft / "model.safetensors")
    assert torch.equal(kept["d2t"], load_file(base / "draft" / "model.safetensors")["d2t"])


def test_an_adapter_of_a_draft_is_saved_alone_and_loads_as_the_draft_it_makes(base, job, tmp_path, tiny_target):
    more = ["draft.lora.rank=4", "train.optim.learning_rate=1e-2"]
    draft = from_draft(job, tmp_path / "lora", base / "untrained", *more)
    names = {path.name for path in draft.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    assert (draft / "adapter_model.safetensors").stat().st_size < (
        base / "draft" / "model.safetensors"
    ).stat().st_size / 2
    assert losses(tmp_path / "lora")[-1] < 0.95 * losses(tmp_path / "lora")[0]
    best = max(row.get("held_out/tau", 0) for row in metrics(tmp_path / "lora"))
    assert best > metrics(tmp_path / "lora")[0]["held_out/tau"]
    again = from_draft(job, tmp_path / "again", draft, "train.steps=1")
    assert metrics(tmp_path / "again")[0]["held_out/tau"] == pytest.approx(best, rel=1e-4)
    assert "model.safetensors" in {path.name for path in again.iterdir()}  # merged
    twice = from_draft(job, tmp_path / "twice", draft, "draft.lora.rank=2", "train.steps=1")  # an adapter of an adapter
    assert metrics(tmp_path / "twice")[0]["held_out/tau"] == pytest.approx(best, rel=1e-4)
    assert run_decode(tiny_target, twice)["token_ids"] == run_decode(tiny_target)["token_ids"]
    assert draft_revision(str(draft)) != draft_revision(str(base / "draft"))


def test_an_adapter_of_a_causal_lm_adds_its_product_to_the_weights(job, tmp_path, tiny_target):
    target = load_model(str(tiny_target), "float32")
    poor, more = tmp_path / "poor", ["train.optim.learning_rate=1e-2"]
    save_draft(build_lm_draft(target.model, (1, 0)), target, "lm", {}, poor)
    draft = from_draft(job, tmp_path / "lora", poor, "draft.lora.rank=2", "draft.lora.alpha=6", *more)
    merged = load_draft(target, str(draft), "float32").model
    plain = load_model(str(poor), "float32").model
    added = load_file(draft / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (added[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = plain.get_submodule(name).weight + 3.0 * b @ a
    assert torch.allclose(merged.get_submodule(name).weight, wanted, atol=1e-6)
    assert not torch.allclose(wanted, plain.get_submodule(name).weight, atol=1e-4)
    assert torch.equal(merged.lm_head.weight, plain.lm_head.weight)
    assert load_model(str(draft)).tokenizer.get_vocab() == target.tokenizer.get_vocab()


def test_the_same_seed_draws_the_same_adapter(job, tmp_path, tiny_draft):
    runs = [from_draft(job, tmp_path / name, tiny_draft, "draft.lora.rank=2", "train.steps=2") for name in "ab"]
    one, other = ((draft / "adapter_model.safetensors").read_bytes() for draft in runs)
    assert one == other


@pytest.mark.parametrize("kind", ["lm", "eagle3"])
def test_an_adapter_merges_into_a_folder_that_needs_it_no_more(base, job, tmp_path, tiny_target, tiny_draft, kind):
    start = base / "untrained" if kind == "eagle3" else tiny_draft
    more = ["draft.lora.rank=2", "train.steps=4", "train.optim.learning_rate=1e-2"]
    adapter = from_draft(job, tmp_path / "lora", start, *more)
    merged = merge(str(adapter), tmp_path / "merged")
    target = load_model(str(tiny_target), "float32")
    one, other = (load_draft(target, str(folder), "float32").model for folder in (adapter, merged))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not any(path.name.startswith("adapter") for path in merged.iterdir())
    assert str(tmp_path) not in "".join(path.read_text(errors="replace") for path in merged.glob("*.json"))
    with pytest.raises(UserError, match=r"merged: exists already"):
        merge(str(adapter), merged)
    with pytest.raises(UserError, match=r"not an adapter"):
        merge(str(merged), tmp_path / "again")


def test_what_a_user_says_beside_init_is_checked_against_it(base, job, tmp_path):
    with pytest.raises(UserError, match=r"its head has 200 ids, and draft.vocabulary is 50"):
        distill(overrides=[*job(tmp_path / "a", NO_SHAPE), "draft.vocabulary=50"], init=str(base / "draft"))
    with pytest.raises(UserError, match=r"draft.layers has no effect"):
        distill(overrides=job(tmp_path / "b"), init=str(base / "draft"))


def test_early_stopping_is_refused_at_once_where_no_interval_can_be_had(job, tmp_path):
    with pytest.raises(UserError, match=r"train.patience needs 5 held-out rows for an interval, and there are 3"):
        run_here(job(tmp_path / "run", "train.patience=1", "data.held_out_rows=3"))


def test_an_adapter_of_peft_without_config_or_tokenizer_loads_everywhere(tiny_target, tiny_draft, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    whole = load_model(str(tiny_draft), "float32")
    wrapped = get_peft_model(whole.model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    wrapped.save_pretrained(tmp_path / "theirs")
    shutil.rmtree(tmp_path / "theirs" / "README.md", ignore_errors=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = wrapped(ids).logits
    found = load_draft(load_model(str(tiny_target)), str(tmp_path / "theirs"), "float32").model(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)


def test_an_adapter_that_does_not_fit_or_has_lost_its_base_is_refused(base, job, tmp_path, tiny_target):
    draft = from_draft(job, tmp_path / "lora", base / "draft", "draft.lora.rank=2", "train.steps=1")
    target = load_model(str(tiny_target))
    weights = load_file(draft / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, draft / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"the adapter does not fit its base model \(Found missing adapter keys"):
        load_draft(target, str(draft))
    config = draft / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match=r"its base model .*gone is gone; put it there"):
        load_draft(target, str(draft))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["draft.kind=lm", "draft.taps=[]"], r"is of kind eagle3, and draft.kind is lm"),
        (["draft.taps=[0,1,2]"], r"reads hidden states \[1, 2\]|leave draft.taps out"),
        (["draft.vocabulary=50"], r"its head has 200 ids, and draft.vocabulary is 50; leave it out, or set 200"),
        (["draft.lora.alpha=3"], r"draft.lora.alpha has no effect without draft.lora.rank"),
    ],
)
def test_settings_that_do_not_fit_the_draft_are_refused(base, job, tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        from_draft(job, tmp_path / "run", base / "draft", *more)


def test_an_adapter_cannot_trim_a_head(job, tmp_path, tiny_draft):
    with pytest.raises(UserError, match=r"its head is whole, and an adapter cannot trim it"):
        from_draft(job, tmp_path / "run", tiny_draft, "draft.lora.rank=2", "draft.vocabulary=64")


def test_an_adapter_needs_a_draft_and_a_feature_draft_has_no_scratch(job, tmp_path):
    with pytest.raises(
        UserError, match=r"draft.lora.rank adapts a draft that there is: name it with draft.init or --init"
    ):
        run_here(job(tmp_path / "a", "draft.lora.rank=2"))
    with pytest.raises(UserError, match=r"a feature draft starts from its target or from a draft"):
        run_here(job(tmp_path / "b", "draft.init=scratch", kind="eagle3"))


def test_alignment_to_a_fine_tuned_target_brings_acceptance_back(tiny_target, tmp_path, job, answers):
    """The target's last layer moves; the old draft is right less often on it, and training brings some of that back."""
    tuned = make_llama(load_model(str(tiny_target)).model.config.vocab_size, layers=3, seed=0)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in tuned.model.layers[-1].parameters():
            weight += 0.5 * torch.randn_like(weight)
    tuned.save_pretrained(tmp_path / "tuned")
    load_model(str(tiny_target)).tokenizer.save_pretrained(tmp_path / "tuned")
    old = load_model(str(tiny_target))
    save_draft(build_lm_draft(old.model, (0, 1, 2)), old, "lm", {}, tmp_path / "draft")  # perfect for the old target
    output = tmp_path / "aligned"
    profile = tmp_path / "profile.json"
    latency = {"c": 0.1, "o": 0.05, "verify_by_width": {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}}
    profile.write_text(json.dumps({"latency": latency}))
    prompts = str(answers.parent / "prompts.jsonl")
    data = DataSettings(answers=tmp_path / "answers.jsonl", prompts=prompts, max_new_tokens=24)
    write_answers(load_model(str(tmp_path / "tuned")), data, seed=0)
    run_here(job(
        output, NO_SHAPE, *warm_start(str(tmp_path / "draft")), f"target={tmp_path / 'tuned'}",
        f"latency_profile={profile}", "train.patience=2", "train.measure_every=4",
        "train.steps=60", "train.optim.learning_rate=1e-2", f"data.answers={data.answers}", "data.held_out_rows=12",
    ))  # fmt: skip
    scores = [row["held_out/speedup"] for row in metrics(output) if "held_out/speedup" in row]
    assert scores[0] > 1
    done = json.loads((output / "done.json").read_text())
    assert done["speedup"] == max(scores) > scores[0]
    assert done["steps"] < 60  # it had stopped rising
