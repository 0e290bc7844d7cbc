"""Chats from wherever they lie: our own file kinds, a saved data set, or the Hub, streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records


def source_records(
    source: str, split: str, bad: BadRows, subset: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row). `source` is a .jsonl or .parquet file, a folder of `save_to_disk`, or a Hub id[@revision].

    A Hub data set is streamed, never downloaded whole; `subset` is its configuration where it has several. Raises
    UserError for a source or split that is not there, and for a stream that breaks off.
    """
    path = Path(source)
    if path.is_file():
        yield from read_records(path, bad)
    elif path.is_dir():
        yield from _numbered(_saved(path, split), f"{source} row")
    else:
        yield from _numbered(_streamed(source, split, subset), f"{source} {split} row")


def _numbered(rows: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number, rest = 0, iter(rows)
    while True:
        try:
            row = next(rest, None)
        except Exception as error:  # datasets raises whatever its loaders, httpx and fsspec raise
            raise UserError(f"{where} {number + 1}: cannot be read ({_first_line(error)})") from error
        if row is None:
            return
        number += 1
        yield f"{where} {number}", dict(row)


def _saved(path: Path, split: str) -> Any:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path}: not a data set folder ({_first_line(error)})") from None
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise UserError(f"{path}: no split {split!r} in it; it has {', '.join(saved)}")
    return saved[split]


def _streamed(source: str, split: str, subset: str | None) -> Any:
    import datasets

    name, _, revision = source.partition("@")
    try:
        return datasets.load_dataset(name, name=subset, revision=revision or None, split=split, streaming=True)
    except Exception as error:  # as above
        raise UserError(
            f"{source}: no such file or folder, and the Hub gives no split {split!r} of it ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
