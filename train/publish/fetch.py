"""Models on the Hub, before anything is done with them."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError

from configs.errors import UserError
from decode.models import UNLOADABLE, first_line
from decode.reference import parse_reference
from decode.trust import find_file

READ, LEFT = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"], ["*/*"]  # nothing that could run


def local_folder(text: str) -> Path:
    """The folder that `text` names, fetched where it is a Hub id[@revision], without anything that could run.

    Raises UserError when there is none.
    """
    if Path(text).is_dir():
        return Path(text)
    reference = parse_reference(text)
    if reference.gguf:
        raise UserError(f"{text}: a GGUF file; expected a folder or a Hub id")
    try:
        return Path(
            snapshot_download(
                reference.location, revision=reference.revision, allow_patterns=READ, ignore_patterns=LEFT
            )
        )  # fmt: skip
    except UNLOADABLE as error:
        raise UserError(f"{text}: cannot be fetched ({first_line(error)})") from None


def unsafe_names(text: str) -> list[str]:
    """Names of the files of a folder or Hub repository that were not fetched, or that could run."""
    if Path(text).is_dir():
        return sorted(file.name for file in Path(text).iterdir() if file.is_file())
    reference = parse_reference(text)
    try:
        return sorted(HfApi().list_repo_files(reference.location, revision=reference.revision))
    except (HTTPError, OSError, ValueError):
        return []  # offline, out of the cache


def is_at_hand(model: str) -> bool:
    """Whether a model lies here or can be fetched, found out without the retries of a download."""
    location = model.partition("@")[0]
    if Path(location).is_dir():
        return True
    if location.count("/") != 1:
        return False  # a bare name is that of a folder somewhere, not a Hub id
    if find_file(location, "config.json", local_files_only=True):
        return True
    try:
        HfApi().model_info(location, timeout=5)
    except (HTTPError, OSError, ValueError):
        return False
    return True
