"""Rows in JSONL and Parquet files: a bad one is named by file and line, a half-written one is removed."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.files import whole_file


def read_records(path: Path, bad: BadRows | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) for each row of a .jsonl or .parquet file; `where` is 'FILE:LINE' for messages.

    Blank lines and a byte-order mark are passed over. Raises UserError for a missing file or another ending; a line
    that is not one JSON object goes to `bad`, which stops there unless it skips.
    """
    bad = bad or BadRows()
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from _read_jsonl(path, bad)
    else:
        raise UserError(f"{path}: expected a .jsonl or .parquet file")


def _read_jsonl(path: Path, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = _json_object(text) if text else None
            except UnicodeDecodeError as error:
                bad.refuse(where, f"not UTF-8 text ({error.reason})")
                continue
            except UserError as error:
                bad.refuse(where, str(error))
                continue
            if row is not None:
                yield where, row


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, got {type(row).__name__}")
    if "\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError("half of a surrogate pair (\\ud800 to \\udfff) is no text") from None
    return row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}:row {number}", row


def append_record(path: Path, row: Any) -> None:
    """Add one line of JSON to a file and see it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def whole_records(path: Path) -> list[Any]:
    """The whole lines of a file of our own that is being appended to; a last one that a kill cut off is removed."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of equal keys in one rename."""
    import pyarrow
    import pyarrow.parquet

    with whole_file(path) as unfinished:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), unfinished)
