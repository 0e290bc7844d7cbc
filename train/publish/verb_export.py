"""The verb `draftsmith export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    draft: Annotated[str, typer.Argument(help="The draft: a folder or a Hub id[@revision].")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    to: Annotated[Literal["transformers", "vllm", "sglang"], typer.Option(help="The engine that is to load it.")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target: a folder or a Hub id[@revision]. Default: the one that the draft names."),
    ] = None,
) -> None:
    """Write a draft as a serving engine loads it, check that it is still the same draft, and print what serves it.

    \f
    Raises UserError when OUT is there already, when target and draft do not fit, and when the engine would refuse the
    draft or misread it.
    """
    from train.publish import export as exporting

    exported = exporting.export(draft, out, to, target)
    typer.echo(f"{exported.folder}: read as {to} reads it, it gives the trained draft's logits", err=True)
    for note in exported.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(exported.command)
