"""Models on the Hub, before anything is done with them."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError

from configs.errors import UserError
from decode.adapters import find_file
from decode.models import UNLOADABLE, first_line, parse_reference

READ = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]  # nothing that could run


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
        return Path(snapshot_download(reference.location, revision=reference.revision, allow_patterns=READ))
    except UNLOADABLE as error:
        raise UserError(f"{text}: cannot be fetched ({first_line(error)})") from None


def is_at_hand(model: str) -> bool:
    """Whether a model lies here or can be fetched, found out without the retries of a download."""
    location = model.partition("@")[0]
    if Path(location).is_dir() or find_file(location, "config.json", local_files_only=True):
        return True
    try:
        HfApi().model_info(location, timeout=5)
    except (HTTPError, OSError, ValueError):
        return False
    return True
