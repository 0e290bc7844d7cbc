"""The verb `data import`: any chat data becomes a file of chats that training reads."""

from pathlib import Path
from typing import Annotated

import typer

from configs.command_line import OnBadRow

READ = {"id", "category", "tools", "answer_ids", "finished", "greedy"}  # columns that data and training know


def import_chats(
    source: Annotated[
        str, typer.Argument(help="A .jsonl or .parquet file, a saved data set's folder, or a Hub id[@revision].")
    ],
    out: Annotated[Path, typer.Option(help="The JSONL file to write: one chat a line, under `messages`.")],
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Configuration of a Hub data set.", show_default="its only one")
    ] = None,
    limit: Annotated[int, typer.Option(help="Chats to take at most; 0 is all.", min=0)] = 0,
    on_bad_row: OnBadRow = "error",
) -> None:
    """Bring chats of any common shape into one file. Unknown roles are named; other columns are kept, and named."""
    import json

    from rich.progress import track

    from configs.bad_rows import BadRows
    from configs.errors import UserError
    from configs.files import sha256, whole_file, write_json
    from configs.provenance import provenance
    from decode.conversations import CHAT_COLUMNS, to_messages
    from eval.sources import source_records

    if out.suffix != ".jsonl":
        raise UserError(f"--out {out}: expected a name that ends in .jsonl")
    if out.exists():
        raise UserError(f"{out}: exists already; name another file or remove this one")
    bad = BadRows(on_bad_row)
    count = 0
    with whole_file(out) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for where, row in track(source_records(source, split, bad, subset), "chats"):
            try:
                messages = to_messages(row)
            except UserError as error:
                bad.refuse(where, str(error))
                continue
            kept = {key: value for key, value in row.items() if key not in CHAT_COLUMNS and value is not None}
            for key in kept.keys() - READ:
                bad.notes[f"column {key!r}: kept, but nothing here reads it"] += 1
            chat = kept | {"id": str(kept.get("id", f"row-{count:08d}")), "messages": messages}
            file.write(json.dumps(chat, ensure_ascii=False, default=str) + "\n")
            count += 1
            if count == limit:
                break
        for line in bad.lines():
            typer.echo(line, err=True)
        if not count:
            raise UserError(f"{source}: no usable chat in it")
    said = {
        "source": source,
        "split": split,
        "subset": subset,
        "limit": limit,
        "skipped": bad.skipped,
        "sha256": sha256(out),
    }
    write_json(out.with_suffix(".source.json"), said | {"made_with": provenance()})
    typer.echo(f"{out}: {count} chats")
