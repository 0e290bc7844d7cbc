"""Settings: defaults < YAML < overrides, and mistakes that are explained."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.errors import UserError
from configs.files import recover, whole_folder
from configs.reader import differing_keys, read_config, to_yaml
from distill.job_settings import JobSettings

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_every_preset_loads(path):
    settings = read_config(JobSettings, path)
    assert read_config(JobSettings, None, ["target=x"]) != settings


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_every_accelerate_preset_is_one_that_accelerate_knows(path):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 1


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("target: t\ntrain: {steps: 7, optim: {learning_rate: 5e-4}}\n")
    settings = read_config(JobSettings, file, ["train.steps=9", "draft.layers=[0, 1, 2]"])
    assert (settings.train.steps, settings.train.optim.learning_rate) == (9, 5e-4)
    assert settings.draft.layers == (0, 1, 2)
    assert settings.train.batch_rows == JobSettings(target="t").train.batch_rows


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("target: t\ntrain: {stepz: 3}", [], ["job.yaml", "train.stepz", "'steps'"]),
        ("target: t\ntrian: {}", [], ["job.yaml", "trian", "'train'"]),
        ("target: t", ["train.optim.lr=1"], ["train.optim.lr", "learning_rate"]),
        ("target: t", ["train.steps"], ["train.steps", "section.field=value"]),
        ("target: t", ["train.steps=0"], ["train.steps", "greater than or equal to 1"]),
        ("train: {}", [], ["'target' is required"]),
        ("- a\n- b", [], ["job.yaml", "mapping", "list"]),
        ("target: [", [], ["job.yaml", "line 1", "not valid YAML"]),
    ],
)
def test_a_mistake_is_one_line_that_names_file_key_and_nearest_known_key(tmp_path, text, overrides, words):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(JobSettings, file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_resolved_config_reads_back_as_the_same_settings(tmp_path):
    settings = read_config(JobSettings, None, ["target=t", "seed=3"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(settings))
    assert read_config(JobSettings, file) == settings


def test_differing_keys_are_named_with_their_path():
    assert differing_keys({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 5, "d": 3}, "e": 0}) == ["b.c", "e"]


def test_print_config_prints_every_default():
    command = [sys.executable, "-m", "distill", "--config", str(ROOT / "configs" / "demo.yaml"), "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert JobSettings.model_validate(yaml.safe_load(printed)) == read_config(JobSettings, ROOT / "configs/demo.yaml")


@pytest.mark.parametrize("verb", ["", "data", "distill", "eval", "decode", "push"])
def test_help_answers_at_once_because_no_framework_is_imported(verb):
    """Under a second is the promise; what makes it hold anywhere is that torch stays out."""
    code = (
        "import sys; from distill.cli import main; sys.argv = ['draftsmith', *sys.argv[1:], '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, *verb.split()]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed.strip().endswith("False")
    assert "Usage:" in printed


def raise_after_writing(path):
    path.write_text("new")
    raise RuntimeError


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "draft"
    with whole_folder(folder) as unfinished:
        (unfinished / "a").write_text("old")
    with pytest.raises(RuntimeError), whole_folder(folder) as unfinished:
        raise_after_writing(unfinished / "a")
    assert (folder / "a").read_text() == "old"


def test_a_replacement_cut_between_its_renames_is_undone(tmp_path):
    (tmp_path / "draft.old").mkdir()
    (tmp_path / "draft.old" / "a").write_text("kept")
    recover(tmp_path / "draft")
    assert (tmp_path / "draft" / "a").read_text() == "kept"
