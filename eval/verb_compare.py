"""The verb `compare`: what changed from one report to another, for people and for CI."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The report.json to start from.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The one to judge, of the same prompts.")],
    min_speedup: Annotated[
        float | None, typer.Option(help="Gate: B's S_decode must not be below this. Off when left out.")
    ] = None,
    max_alpha_drop: Annotated[
        float | None, typer.Option(help="Gate: α must not fall from A to B by more than this. Off when left out.")
    ] = None,
) -> None:
    """Compare two reports of one suite: α, τ and S_decode, with paired 95 % intervals of what changed.

    Exit code 4 when a gate fails, or B's losslessness certificate: for the CI of a draft.
    """
    from rich.console import Console
    from rich.table import Table

    from eval.comparison import compare as changes_of
    from eval.comparison import failed_gates, read_report

    reports = read_report(before), read_report(after)
    table = Table("figure", str(before), str(after), "change", "95 % interval")
    for change in changes_of(*reports):
        ci = change.difference_ci
        spread = f"[{ci[0]:+.3f}, {ci[1]:+.3f}]" if ci else "too few prompts"
        row = f"{change.before:.3f}", f"{change.after:.3f}", f"{change.after - change.before:+.3f}"
        table.add_row(change.name, *row, spread)
    Console().print(table)
    failed = failed_gates(*reports, min_speedup, max_alpha_drop)
    for line in failed:
        typer.echo(f"gate: {line}", err=True)
    if failed:
        raise typer.Exit(4)
