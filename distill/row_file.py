"""A file of rows that a killed run goes on with where it was."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from configs.records import whole_records


def fill_file(path: Path, ids: Sequence[str], batch_rows: int, make: Any, title: str, alone: bool = False) -> None:
    """Append the rows of every batch that is not in `path` yet. `make(row numbers)` gives rows.

    Batches are cut from the whole list, so a resumed run makes the same ones; where each row could be made `alone`,
    only the missing ones of a batch are made.
    """
    done = {row["id"] for row in whole_records(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with Progress() as progress, path.open("a", encoding="utf-8") as file:
        bar = progress.add_task(title, total=len(ids), completed=sum(i in done for i in ids))
        for first in range(0, len(ids), batch_rows):
            batch = range(first, min(first + batch_rows, len(ids)))
            missing = [i for i in batch if ids[i] not in done]
            if not missing:
                continue
            rows = {row["id"]: row for row in make(missing if alone else batch)}
            file.write("".join(json.dumps(rows[ids[i]], ensure_ascii=False) + "\n" for i in missing))
            file.flush()
            os.fsync(file.fileno())
            progress.advance(bar, len(missing))
