"""Publish a draft folder on the Hub: one commit with weights, config, tokenizer, report and card.

What can be wrong here is checked before the first request, and what can be wrong there before the first byte of
weights. The draft's own files are only ever read, so a push can be run again.
"""

import json
import logging
import shlex
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from safetensors import SafetensorError, safe_open

from configs.errors import UserError
from decode.adapters import ADAPTER_CONFIG
from decode.trust import INDEX, PICKLE_SUFFIXES, WEIGHTS, is_plain_name, stays_inside
from train.publish.access import check_repo_id, hub_refusals, open_repository, retrying, usable_token
from train.publish.card import draft_block, write_card

logger = logging.getLogger(__name__)

PUSHED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "report.json",
    "report.md",
    "training.json",
    "README.md",
    "LICENSE",
    "plots/*.svg",
    "plots/*.png",
)
COMMIT_MESSAGE = "Push a draft model with draftsmith"


def push(
    folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None, token: str | None = None
) -> str:
    """Push the draft in `folder` to the model repository `repo_id` in one commit and return the commit's URL.

    The token, the name and the right to write are checked first; the repository, and the branch `revision`, are made
    when they don't exist. What passes by itself (a busy Hub, a cut connection) is tried again, and weights that are
    there already aren't sent again. The token is `token`, else the one that huggingface_hub finds (HF_TOKEN or a
    login); HF_ENDPOINT names another Hub.

    Raises UserError when `repo_id` is not NAME/REPO, when `folder` is not a whole draft folder or holds
    pickled weights, when there is no token, when `private` is asked of a public repository, and when
    the Hub refuses or can't be reached. A failed push changes nothing in the folder but README.md.
    """
    check_repo_id(repo_id)
    check_draft_folder(folder)
    command = push_command(folder, repo_id, private, revision)
    found = usable_token(token, command)
    with hub_refusals(repo_id, found, f"The draft in {folder} is unchanged; run again: {command}"):
        api = open_repository(repo_id, private, revision, found)
        write_card(folder, repo_id=repo_id)
        files = _pushed_files(folder)
        return retrying(lambda: _commit(api, folder, files, repo_id, revision))


def check_push(folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None) -> None:
    """Check that a draft that is yet to be trained into `folder` can be pushed; makes the repository when missing.

    Raises UserError for all that `push` can know beforehand: the name, the token, the right to write.
    """
    check_repo_id(repo_id)
    found = usable_token(None, "the same command again")
    with hub_refusals(repo_id, found, f"Nothing was trained yet; to train without a push leave out push_to={repo_id}"):
        open_repository(repo_id, private, revision, found)


def push_command(folder: Path, repo_id: str, private: bool = False, revision: str | None = None) -> str:
    """The command line of a push, to be run again."""
    words = ["draftsmith", "push", str(folder), repo_id]
    words += ["--private"] if private else []
    words += ["--revision", revision] if revision else []
    return shlex.join(words)


def check_draft_folder(folder: Path) -> None:
    """Check that `folder` is a whole draft folder that is safe to publish.

    Raises UserError naming the file when a part is missing, the weights are cut short, or pickled weights
    lie beside them.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a draft folder as a training run writes it")
    draft_block(folder)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickled:
        raise UserError(
            f"{folder}: {', '.join(pickled)} may hold pickled code, which is never published; "
            "weights belong in model.safetensors: move the file out of the folder"
        )
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: no tokenizer.json; copy the target's tokenizer files into the folder")
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder}: an adapter; write the whole draft with `draftsmith merge {folder} OUT` and push that"
        )
    for weights in _weight_files(folder):
        _check_weights(weights)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [folder / WEIGHTS]
    try:
        shards = sorted({str(shard) for shard in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of weight shards; save the draft again") from None
    outside = [shard for shard in shards if not is_plain_name(shard)]
    if outside:
        raise UserError(f"{index}: points outside of the folder ({outside[0]}); save the draft again")
    return [folder / shard for shard in shards]


def _check_weights(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path.parent}: no {path.name}; expected the draft's weights under that name")
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); save the draft again") from None


def _commit(api: HfApi, folder: Path, files: list[Path], repo_id: str, revision: str | None) -> str:
    # Not upload_folder: with Xet it may make several commits, and its patterns reach into subfolders.
    operations = [
        CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=path) for path in files
    ]
    commit = api.create_commit(repo_id, operations, commit_message=COMMIT_MESSAGE, revision=revision)
    return str(commit.commit_url)


def _pushed_files(folder: Path) -> list[Path]:
    shards = set(_weight_files(folder))
    files = sorted(shards | {path for pattern in PUSHED for path in folder.glob(pattern) if path.is_file()})
    outside = [path.name for path in files if not stays_inside(path, folder)]
    if outside:
        raise UserError(f"{folder}: {', '.join(outside)} leads out of the folder; put the file itself there")
    left_out = sorted({path.name for path in folder.iterdir() if path.is_file()} - {path.name for path in files})
    if left_out:
        logger.warning("not pushed, because they are no part of a draft: %s", ", ".join(left_out))
    return files
