"""The verb `draftsmith merge`."""

from pathlib import Path
from typing import Annotated

import typer


def merge(
    adapter: Annotated[str, typer.Argument(help="A draft that is an adapter: a folder or a Hub id[@revision].")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
) -> None:
    """Write the draft that an adapter and its base make together as a folder of its own.

    \f
    Raises UserError when it is no adapter, when it does not fit its base, and when OUT is there already.
    """
    from train.publish import merge as merging

    typer.echo(f"{merging.merge(adapter, out)}: the merged draft")
