"""What a model may do to this machine when it is loaded: nothing, unless its user says so.

Two flags before the verb (`draftsmith --trust-remote-code eval ...`) or their environment variables, which reach every
process of a launch.
"""

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils.hub import cached_file

from configs.errors import UserError

REMOTE_CODE, PICKLE = "DRAFTSMITH_TRUST_REMOTE_CODE", "DRAFTSMITH_ALLOW_PICKLE"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
INDICES = (INDEX, PICKLED[1])
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}


def trust(remote_code: bool, pickle: bool) -> None:
    """Allow it for this process and those that it starts."""
    os.environ.update({name: "1" for name, said in ((REMOTE_CODE, remote_code), (PICKLE, pickle)) if said})


def is_trusted(name: str) -> bool:
    """Whether the user allowed it."""
    return os.environ.get(name) == "1"


def code_arguments() -> dict[str, Any]:
    """For transformers' from_pretrained; without it transformers asks on the terminal."""
    return {"trust_remote_code": is_trusted(REMOTE_CODE)}


def weight_arguments() -> dict[str, Any]:
    """For transformers' from_pretrained of a model: safetensors, or also pickled weights where that is allowed."""
    return code_arguments() | {"use_safetensors": None if is_trusted(PICKLE) else True}


def check_files(name: str, location: str, **arguments: Any) -> None:
    """Raises UserError where loading the weights in a folder or repository would run, or read, what it should not."""
    for file in INDICES:
        index = find_file(location, file, **arguments) if file == INDEX or is_trusted(PICKLE) else None
        outside = sorted(shard for shard in _shards(name, index) if not is_plain_name(shard)) if index else []
        if outside:
            raise UserError(f"{name}: {file} points outside of the folder ({outside[0]}); do not use this model")
    folder = Path(location)
    whole = any((folder / file).is_file() for file in (INDEX, WEIGHTS))
    if folder.is_dir() and not whole and not is_trusted(PICKLE) and any((folder / file).is_file() for file in PICKLED):
        raise UserError(f"{name}: its weights are pickled{pickle_advice()}")


def _shards(name: str, index: str) -> set[str]:
    try:
        return {str(shard) for shard in json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{name}: {Path(index).name} is no index of weight shards; get it again") from None


def find_file(location: str, name: str, **arguments: Any) -> str | None:
    """Where a file of a folder or Hub repository lies; None where there is none, or no such repository."""
    try:
        return cached_file(
            location, name, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, **arguments,
        )  # fmt: skip
    except OSError:
        return None


def is_plain_name(file: str) -> bool:
    """Whether a file name stays in its folder."""
    return PurePosixPath(file).name == file and "\\" not in file and file not in ("", ".", "..")


def stays_inside(file: Path, folder: Path) -> bool:
    """Whether a file of a folder lies in it, and is no link to another place (but the Hub's cache is made of those)."""
    real, home = file.resolve(), folder.resolve()
    return real.is_relative_to(home) or real.parent == home.parent.parent / "blobs"


def refusal_advice(error: Exception) -> str:
    """What to add to transformers' refusal of a model that brings code or pickles; nothing to another error."""
    said = str(error)
    if "trust_remote_code" in said:
        how = f"`draftsmith --trust-remote-code ...` ({REMOTE_CODE}=1)"
        return f"; it brings Python code of its own: if you trust its author, say {how}"
    return f"; if its weights are pickled{pickle_advice()}" if "safetensors" in said and "no file" in said else ""


def pickle_advice() -> str:
    """What to say after naming pickled weights."""
    how = f"`draftsmith --allow-pickle ...` ({PICKLE}=1)"
    return f", loading them may run any code: ask for safetensors, or, if you trust their author, say {how}"
