"""The verb `eval`: measure what a draft is worth."""

from pathlib import Path
from typing import Annotated

import typer

from configs.command_line import with_options
from eval.eval_options import EvalOptions


@with_options
def evaluate(
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.md, report.html, rounds.parquet and plots.")
    ],
    options: EvalOptions,
) -> None:
    """Measure a draft: acceptance, latency, speed-up with its interval, and whether the output is unchanged.

    A local draft folder made here also gets report.json and the recommended γ, for `draftsmith push`.
    Exit code 3 when the losslessness certificate fails.
    """
    from rich.console import Console

    from eval.measure import measure, summary_rows

    report = measure(options, out)
    console = Console(soft_wrap=True, highlight=False)
    for name, text in summary_rows(report):
        console.print(f"{name:>14}  {text}", markup=False)
    console.print(report.verdict.line, style="bold", markup=False)
    console.print(f"report: {out / 'report.md'}, {out / 'report.html'}", markup=False)
    if not report.verdict.lossless:
        raise typer.Exit(3)
