"""What a model may do to this machine when it is loaded: nothing, unless its user says so.

Two flags before the verb (`draftsmith --trust-remote-code eval ...`) or their environment variables, which reach every
process of a launch.
"""

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from configs.errors import UserError
from decode.adapters import find_file

REMOTE_CODE, PICKLE = "DRAFTSMITH_TRUST_REMOTE_CODE", "DRAFTSMITH_ALLOW_PICKLE"
INDEX, PICKLED = "model.safetensors.index.json", ("pytorch_model.bin", "pytorch_model.bin.index.json")


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
    index = find_file(location, INDEX, **arguments)
    if index:
        try:
            shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{name}: {INDEX} is no index of weight shards; get it again") from None
        outside = sorted(str(shard) for shard in shards if not is_plain_name(str(shard)))
        if outside:
            raise UserError(f"{name}: {INDEX} points outside of the folder ({outside[0]}); do not use this model")
        return
    if find_file(location, "model.safetensors", **arguments) or is_trusted(PICKLE):
        return
    if any(find_file(location, file, **arguments) for file in PICKLED):
        raise UserError(
            f"{name}: its weights are pickled, and loading them may run any code; ask for safetensors, or, if you "
            f"trust its author, say `draftsmith --allow-pickle ...` ({PICKLE}=1)"
        )


def is_plain_name(file: str) -> bool:
    """Whether a file name stays in its folder."""
    return PurePosixPath(file).name == file and "\\" not in file and file not in ("", ".", "..")


def remote_code_advice(error: Exception) -> str:
    """What to add to transformers' refusal of a model that brings its own code; nothing to another error."""
    if "trust_remote_code" not in str(error):
        return ""
    how = f"`draftsmith --trust-remote-code ...` ({REMOTE_CODE}=1)"
    return f"; it brings Python code of its own: if you trust its author, say {how}"
