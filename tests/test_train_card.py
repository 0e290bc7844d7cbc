"""The model card says what was measured, claims nothing else and shows nobody's folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from configs.errors import UserError
from train.publish.card import MARK, card, write_card

BLOCK = {
    "kind": "lm",
    "target": "acme/target-135m",
    "target_revision": "abc123",
    "tokenizer_fingerprint": "f1f1",
    "chat_template_hash": "c2c2",
    "recommended_num_draft_tokens": 4,
    "license": "apache-2.0",
}
REPORT = {
    "verdict": {
        "speedup_decode": 1.834,
        "speedup_decode_ci": [1.75, 1.92],
        "speedup_e2e": 1.71,
        "tau": 2.9,
        "alpha": 0.66,
        "lossless": True,
    },
    "latency": {"c": 0.061, "v": {"2": 1.37}, "o": 0.09, "plain_step_s": 0.0391},
    "provenance": {"device": "cpu", "hostname": "builder-7", "prompts": "/home/ada/work/prompts.jsonl"},
    "settings": {"dtype": "bfloat16", "note": "from ~/runs/a and C:\\drafts\\b over 12 tokens/s"},
    "verdict_line": "S_decode 9.99×",
}


def draft_files(folder: Path, report: Any = None, training: Any = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    block = {**BLOCK, **changes}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "draftsmith": block}))
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report))
    if training is not None:
        (folder / "training.json").write_text(json.dumps(training))
    return folder


def with_verdict(**changes: Any) -> dict[str, Any]:
    return {**REPORT, "verdict": {**REPORT["verdict"], **changes}}  # type: ignore[dict-item]


def test_metadata_names_the_target_and_what_the_draft_is(tmp_path: Path) -> None:
    assert card(draft_files(tmp_path)).data.to_dict() == {
        "base_model": "acme/target-135m",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "draftsmith"],
    }


def test_an_unknown_license_is_left_out_of_the_metadata_and_named_in_the_limits(tmp_path: Path) -> None:
    made = card(draft_files(tmp_path, license=None))
    assert "license" not in made.data.to_dict()
    assert "licence is not stated" in made.text


def test_a_draft_that_transformers_cannot_load_gets_no_transformers_snippet(tmp_path: Path) -> None:
    made = card(draft_files(tmp_path, kind="eagle3"))
    assert "library_name" not in made.data.to_dict()
    assert "assistant_model" not in made.text
    assert "draftsmith decode" in made.text


def test_the_verdict_table_shows_the_report(tmp_path: Path) -> None:
    text = card(draft_files(tmp_path, REPORT)).text
    assert "| lossless | yes |" in text
    assert "| speed-up, decoding | 1.83× [1.75, 1.92] |" in text
    assert "| speed-up, end to end | 1.71× |" in text
    assert "| τ, tokens per target pass | 2.90 |" in text
    assert "| α, acceptance | 0.66 |" in text
    for fact in ["- dtype: `bfloat16`", "- c: `0.061`", "- v.2: `1.37`", "- device: `cpu`"]:
        assert fact in text


@pytest.mark.parametrize("lossless", [False, None, "yes"])
def test_a_report_without_a_passed_certificate_claims_no_speed_up(tmp_path: Path, lossless: Any) -> None:
    text = str(card(draft_files(tmp_path, with_verdict(lossless=lossless))))
    assert "no speed-up is claimed" in text
    assert ("not lossless: no speed-up is claimed" in text) == (lossless is False)
    for number in ["1.83", "1.71", "1.75", "9.99", "2.90", "×"]:
        assert number not in text


def test_a_missing_report_reads_not_measured(tmp_path: Path) -> None:
    text = str(card(draft_files(tmp_path)))
    assert "not measured" in text
    assert "×" not in text
    assert "How it was measured" not in text


@pytest.mark.parametrize("value", [None, "fast", True, float("nan")])
def test_a_value_that_is_no_number_reads_not_measured(tmp_path: Path, value: Any) -> None:
    text = card(draft_files(tmp_path, with_verdict(speedup_decode=value, speedup_decode_ci=None))).text
    assert "| speed-up, decoding | not measured |" in text
    assert "| τ, tokens per target pass | 2.90 |" in text


@pytest.mark.parametrize(
    "target",
    ["/home/ada/models/mine", "models/mine", "./mine", "../mine", "~/mine", "C:\\models\\mine", "mine"],
)
def test_a_local_target_is_no_base_model_and_shows_only_its_last_name(tmp_path: Path, target: str) -> None:
    made = card(draft_files(tmp_path, target=target))
    assert "base_model" not in made.data.to_dict()
    assert "`mine`" in made.text
    assert 'from_pretrained("TARGET")' in made.text
    for part in ["/home", "ada", "models/mine", "C:", "~/"]:
        assert part not in str(made)


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = draft_files(tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    assert card(folder).data.base_model == "acme/target-135m"
    (tmp_path / "acme/target-135m").mkdir(parents=True)
    assert card(folder).data.base_model is None


def test_no_local_path_and_no_machine_name_of_the_report_reaches_the_card(tmp_path: Path) -> None:
    training = {"seed": 7, "data": "file:///srv/data/chats.jsonl", "config": {"out": "/mnt/runs/a"}}
    text = str(card(draft_files(tmp_path, REPORT, training)))
    for part in ["/home", "ada", "builder-7", "~/runs", "C:\\", "drafts\\", "/srv", "/mnt", str(tmp_path)]:
        assert part not in text
    for kept in ["- prompts: `prompts.jsonl`", "from a and b over 12 tokens/s", "- seed: `7`", "chats.jsonl"]:
        assert kept in text
    assert "https://huggingface.co/acme/target-135m" in text


def test_the_examples_name_the_repository_and_the_draft_length(tmp_path: Path) -> None:
    text = card(draft_files(tmp_path), repo_id="me/my-draft").text
    assert "# my-draft" in text
    assert "decode --target acme/target-135m@abc123 --draft me/my-draft --num-draft-tokens 4" in text
    assert 'target = AutoModelForCausalLM.from_pretrained("acme/target-135m", revision="abc123")' in text
    assert 'draft = AutoModelForCausalLM.from_pretrained("me/my-draft")' in text
    assert "num_assistant_tokens = 4" in text
    without = card(draft_files(tmp_path, recommended_num_draft_tokens=None)).text
    assert "num_assistant_tokens" not in without
    assert "--num-draft-tokens" not in without


def test_a_card_is_written_whole_and_again(tmp_path: Path) -> None:
    write_card(draft_files(tmp_path))
    assert "not measured" in (tmp_path / "README.md").read_text()
    write_card(draft_files(tmp_path, REPORT))
    assert (tmp_path / "README.md").read_text() == str(card(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "report.json"]


def test_a_readme_by_another_hand_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_text("my own words")
    write_card(draft_files(tmp_path))
    assert (tmp_path / "README.md").read_text() == "my own words"
    assert "kept as it is" in caplog.text
    (tmp_path / "README.md").write_text("old words\n" + MARK)
    write_card(tmp_path)
    assert "old words" not in (tmp_path / "README.md").read_text()


def test_a_broken_report_is_an_error_and_not_a_missing_one(tmp_path: Path) -> None:
    (draft_files(tmp_path) / "report.json").write_text('{"verdict": ')
    with pytest.raises(UserError, match=r"report\.json: not valid JSON"):
        card(tmp_path)


@pytest.mark.parametrize("config", [None, "{}", "[1]", "{", '{"draftsmith": "lm"}'])
def test_a_folder_without_a_draftsmith_block_gets_no_card(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"config\.json"):
        write_card(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_the_measured_figures_stand_in_the_metadata_with_how_they_were_measured(tmp_path: Path) -> None:
    report = REPORT | {
        "settings": {"suite": "suite", "num_draft_tokens": 4, "temperature": 0.0, "run_dtype": "bfloat16"},
        "provenance": {"device": "cpu", "processor": "AMD", "versions": {"torch": "2.13.0"}},
        "prompts": [{}] * 7,
    }
    made = card(draft_files(tmp_path, report), repo_id="me/my-draft")
    (index,) = made.data.to_dict()["model-index"]
    assert index["name"] == "my-draft"
    metrics = {m["type"]: m for result in index["results"] for m in result["metrics"]}
    assert {name: m["value"] for name, m in metrics.items()} == {
        "alpha": 0.66, "tau": 2.9, "speedup_decode": 1.834, "speedup_e2e": 1.71,
    }  # fmt: skip
    how = metrics["tau"]["args"]
    assert how["num_draft_tokens"] == 4
    assert how["run_dtype"] == "bfloat16"
    assert how["processor"] == "AMD"
    assert how["torch_version"] == "2.13.0"
    assert index["results"][0]["dataset"]["name"] == "suite, 7 prompts"
    again = ModelCard(str(made))
    assert {r.metric_type: r.metric_value for r in again.data.eval_results}["speedup_e2e"] == 1.71


@pytest.mark.parametrize("report", [None, with_verdict(lossless=False)])
def test_what_was_not_measured_or_not_lossless_is_not_in_the_metadata(tmp_path: Path, report: Any) -> None:
    assert "model-index" not in card(draft_files(tmp_path, report)).data.to_dict()


def test_serve_commands_name_the_engine_that_a_folder_was_exported_for_or_the_export(tmp_path: Path) -> None:
    text = card(draft_files(tmp_path / "a", kind="eagle3"), repo_id="me/d").text
    assert "draftsmith export me/d draft-for-vllm --to vllm --target acme/target-135m" in text
    assert "--speculative-algorithm EAGLE3" in text
    assert '"num_speculative_tokens": 4' in text
    served = card(draft_files(tmp_path / "b", kind="eagle3", export={"engine": "vllm"}), repo_id="me/d").text
    assert (
        'vllm serve acme/target-135m --revision abc123 --speculative-config \'{"method": "eagle3", "model": "me/d"'
        in served
    )
    assert "sglang" not in served
    assert "eagle3" in card(tmp_path / "b").data.tags


def test_a_head_that_only_this_decoder_reads_is_not_offered_to_transformers(tmp_path: Path) -> None:
    made = card(draft_files(tmp_path, vocabulary_map_hash="ab12"))
    assert "library_name" not in made.data.to_dict()
    assert "assistant_model" not in made.text


def test_the_training_text_and_what_of_it_counted_are_said(tmp_path: Path) -> None:
    data = {"prompts": "demo", "self_prompts": 1920, "temperature": 1.0, "greedy_too": True, "mask": "all"}
    made = {"temperature": 1.0, "greedy_too": True}
    text = card(draft_files(tmp_path, training={"config": {"data": data}, "answers": made})).text
    assert "the target's own answers, at temperature 1 and greedily, to prompts `demo` and 1920 that it wrote" in text
    assert "Supervised: every answer's tokens, nothing of a prompt." in text
    unknown = card(draft_files(tmp_path, training={"config": {"data": data | {"text": True}}, "answers": None})).text
    assert "The origin of the training text is not recorded. Supervised: all of the text." in unknown


@pytest.mark.parametrize(
    "report", [{"settings": "x"}, {"prompts": 3}, {"provenance": {"versions": []}}, {"provenance": None}]
)
def test_odd_parts_of_a_report_are_left_out(tmp_path: Path, report: Any) -> None:
    assert "1.83" in str(card(draft_files(tmp_path, with_verdict() | report, kind=["lm"])))
