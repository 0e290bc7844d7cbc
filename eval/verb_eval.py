"""The verb `eval`: measure what a draft is worth."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    target: Annotated[str, typer.Option(help="Target: a folder, a Hub id[@revision] or a GGUF file.")],
    draft: Annotated[str, typer.Option(help="Draft, named like the target.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.md and plots.")],
    suite: Annotated[str, typer.Option(help="Prompt file (.jsonl, .parquet) or the name of one of ours.")] = "suite",
    max_prompts: Annotated[int, typer.Option(help="Prompts, taken from the categories in turn.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer at most.")] = 64,
    num_draft_tokens: Annotated[int, typer.Option(help="γ: tokens drafted per round, 1 or more.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws and of HF generate.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (the accelerator where there is one), cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[
        int, typer.Option(help="CPU threads; 0: as many as make plain decoding fastest, measured first.")
    ] = 0,
    verifier: Annotated[
        str, typer.Option(help="token, block or match; all lossless, they differ when sampling.")
    ] = "block",
    repeats: Annotated[int, typer.Option(help="Times each arm decodes each prompt; the median counts.")] = 1,
    longest_draft: Annotated[int, typer.Option(help="Largest γ whose speed-up is predicted.")] = 8,
    fp32_prompts: Annotated[int, typer.Option(help="Prompts that the certificate decodes again in float32.")] = 8,
    fp32_tokens: Annotated[int, typer.Option(help="Tokens of each of them.")] = 32,
) -> None:
    """Measure a draft: acceptance, latency, speed-up with its interval, and whether the output is unchanged.

    A local draft folder made here also gets report.json and the recommended γ, for `draftsmith push`.
    Exit code 3 when the losslessness certificate fails.
    """
    settings = {key: value for key, value in locals().items() if key != "out"}
    from pydantic import ValidationError
    from rich.console import Console

    from configs.errors import UserError
    from eval.measure import EvalSettings, measure, summary_rows

    try:
        checked = EvalSettings(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']} (got {first['input']!r})"
        ) from None
    report = measure(checked, out)
    console = Console(soft_wrap=True, highlight=False)
    for name, text in summary_rows(report):
        console.print(f"{name:>14}  {text}", markup=False)
    console.print(report.verdict.line, style="bold", markup=False)
    console.print(f"report: {out / 'report.md'}", markup=False)
    if not report.verdict.lossless:
        raise typer.Exit(3)
