"""How every command runs: a user's mistake is one line on stderr and exit code 2, a bug keeps its traceback."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer

from configs.errors import UserError


def run_verb(verb: Callable[..., Any]) -> None:
    """Run one verb as a program of its own (`python -m decode ...`)."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(verb)
    _run(app)


def run_verbs(verbs: Mapping[str, Callable[..., Any]], help_text: str) -> None:
    """Run a program with one sub-command for each verb."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=help_text, rich_markup_mode=None)
    for name, verb in verbs.items():
        app.command(name)(verb)
    _run(app)


def _run(app: typer.Typer) -> None:
    try:
        app()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"process {rank}: {error}", file=sys.stderr)
        sys.exit(2)
