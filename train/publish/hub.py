"""Publish a draft folder on the Hub: one commit with weights, config, tokenizer, report and card.

What can be wrong here is checked before the first request; what goes wrong there becomes a UserError
that says what to do next and the command to run again. The draft's own files are only ever read.
"""

import json
import logging
import os
import shlex
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token

# HTTPError is the base of connection errors in whichever HTTP client the installed huggingface_hub uses.
from huggingface_hub.errors import HFValidationError, HTTPError, OIDCError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from configs.errors import UserError
from decode.adapters import ADAPTER_CONFIG
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
PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
COMMIT_MESSAGE = "Push a draft model with draftsmith"

ADVICE = {
    400: "correct what the Hub says is wrong",
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that is valid and may write",
    403: "take a token that may write to this namespace, or push to a namespace of your own",
    404: "check the spelling of repository and revision, and that the token may see them",
    409: "somebody else is changing the repository: wait a moment",
    412: "somebody else is changing the repository: wait a moment",
    413: "look for a file in the folder that should not be there",
    429: "the Hub asks for a pause: wait a few minutes",
}


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Push the draft in `folder` to the model repository `repo_id` in one commit and return the commit's URL.

    The repository, and the branch `revision`, are made when they don't exist. The token is `token`, else
    the one that huggingface_hub finds (HF_TOKEN or a login); HF_ENDPOINT names another Hub.

    Raises UserError when `repo_id` is not NAME/REPO, when `folder` is not a whole draft folder or holds
    pickled weights, when there is no token, when `private` is asked of a public repository, and when
    the Hub refuses or can't be reached. A failed push changes nothing in the folder but README.md.
    """
    _check_repo_id(repo_id)
    check_draft_folder(folder)
    command = _command(folder, repo_id, private, revision)
    usable_token = _usable_token(token, command)
    write_card(folder, repo_id=repo_id)
    api = HfApi(endpoint=_endpoint(), token=usable_token)
    try:
        return _commit(api, folder, repo_id, private, revision)
    except UserError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        # Without the cause: a server may quote the token, and a traceback would print it.
        reason = _reason(error, usable_token)
        raise UserError(f"{repo_id}: {reason}. The draft in {folder} is unchanged; run again: {command}") from None


def check_draft_folder(folder: Path) -> None:
    """Check that `folder` is a whole draft folder that is safe to publish.

    Raises UserError naming the file when a part is missing, the weights are cut short, or pickled weights
    lie beside them.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a draft folder as a training run writes it")
    draft_block(folder)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLED)
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


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repository {repo_id!r}: expected NAME/REPO, e.g. my-name/my-draft ({error})") from None
    if "/" not in repo_id:
        raise UserError(f"repository {repo_id!r}: expected NAME/REPO, e.g. my-name/{repo_id}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        return sorted({folder / shard for shard in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of weight shards; save the draft again") from None


def _check_weights(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path.parent}: no {path.name}; expected the draft's weights under that name")
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); save the draft again") from None


def _usable_token(token: str | None, command: str) -> str:
    try:
        found = token or get_token()
    except OIDCError:
        raise UserError(f"HF_OIDC_RESOURCE is set, but gave no token; unset it, then run: {command}") from None
    if not found:
        raise UserError(f"no Hub token; log in with `hf auth login` or set HF_TOKEN, then run: {command}")
    # The HTTP client would refuse such a header with a message that quotes it.
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise UserError(f"the Hub token holds a space or an unprintable character; set it again, then run: {command}")
    return found


def _endpoint() -> str | None:
    # huggingface_hub reads HF_ENDPOINT once, when it is imported; a notebook may set it later.
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _commit(api: HfApi, folder: Path, repo_id: str, private: bool, revision: str | None) -> str:
    # None and not False: an organisation whose repositories are private by default keeps its default.
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise UserError(
            f"{repo_id}: --private was asked, but the repository exists and is public; make it private in "
            "its settings, push without --private, or choose another name"
        )
    if revision and revision != "main" and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    # Not upload_folder: with Xet it may make several commits, and its patterns reach into subfolders.
    operations = [
        CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=path)
        for path in _pushed_files(folder)
    ]
    commit = api.create_commit(repo_id, operations, commit_message=COMMIT_MESSAGE, revision=revision)
    return str(commit.commit_url)


def _pushed_files(folder: Path) -> list[Path]:
    files = sorted({path for pattern in PUSHED for path in folder.glob(pattern) if path.is_file()})
    left_out = sorted({path.name for path in folder.iterdir() if path.is_file()} - {path.name for path in files})
    if left_out:
        logger.warning("not pushed, because they are no part of a draft: %s", ", ".join(left_out))
    return files


def _command(folder: Path, repo_id: str, private: bool, revision: str | None) -> str:
    words = ["draftsmith", "push", str(folder), repo_id]
    words += ["--private"] if private else []
    words += ["--revision", revision] if revision else []
    return shlex.join(words)


def _reason(error: Exception, token: str) -> str:
    """What the Hub or the network said and what to do about it, on one line and without the token."""
    response = _response(error)
    words = getattr(error, "server_message", None) or str(error.__cause__ or error)
    said = " ".join(str(words).split()).replace(token, "***")[:300]
    status = getattr(response, "status_code", None)
    if status is None:
        advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        return f"the push did not get through ({type(error).__name__}: {said}); {advice}"
    advice = ADVICE.get(status, "the Hub has trouble: wait a few minutes" if status >= 500 else "see what it says")
    return f"the Hub answered {status} ({said}); {advice}"


def _response(error: BaseException | None) -> object | None:
    # A failed upload of weights arrives as a RuntimeError whose cause holds the answer.
    while error is not None:
        response: object | None = getattr(error, "response", None)
        if response is not None:
            return response
        error = error.__cause__
    return None
