"""Files that are whole or absent: written under a temporary name, then renamed."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

from configs.errors import UserError


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, as hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON in one rename."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file of our own."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write `text` in one rename; missing parent folders are made."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` that takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def without_local_paths(content: Any) -> Any:
    """`content` with every absolute path in it cut to its last name: what is published names no machine's folders."""
    if isinstance(content, dict):
        return {key: without_local_paths(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_local_paths(value) for value in content]
    if isinstance(content, str) and (Path(content).is_absolute() or PureWindowsPath(content).is_absolute()):
        return PureWindowsPath(content).name
    return content


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path` that takes its place when the block ends without an error.

    A folder that stood at `path` is moved aside first and removed last, so that a crash leaves one of the two.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, aside = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    recover(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        path.replace(aside)
    temporary.replace(path)
    shutil.rmtree(aside, ignore_errors=True)


def recover(path: Path) -> None:
    """Undo a replacement that was cut between its two renames; otherwise do nothing."""
    aside = path.with_name(path.name + ".old")
    if aside.exists():
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.replace(path)


@contextmanager
def writing(path: Path, temporary: Path) -> Iterator[None]:
    """Turn a write that fails, as on a full disk, into a UserError, and remove what it had begun at `temporary`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not re.search("writ|iostream|open file", str(error)):
            raise  # torch reports failed writes so, and much else
        shutil.rmtree(temporary, ignore_errors=True)
        said = str(error).strip().splitlines()
        raise UserError(
            f"{path}: cannot be written ({said[0] if said else type(error).__name__}); make room there and start "
            "again: what was finished before is whole"
        ) from error
