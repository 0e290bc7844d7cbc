"""The verb `plan`: whether a draft would pay, and which one, before any training."""

from pathlib import Path
from typing import Annotated

import typer

from configs.command_line import Device


def plan(
    out: Annotated[Path, typer.Option(help="Folder for plan.json, profile.json and pilots.")],
    target: Annotated[str | None, typer.Option(help="Target, as for decode. Not needed with --profile alone.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="profile.json of the machine to plan for. Default: this machine, measured now."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Answers of the target: for what a head may leave out, and for pilots.")
    ] = None,
    budget_tokens: Annotated[int, typer.Option(help="Supervised tokens that you would make.", min=1000)] = 1_000_000,
    pilots: Annotated[
        int, typer.Option(help="Shapes to train on 3 % of the budget, those first that pay soonest.", min=0)
    ] = 0,
    batch: Annotated[
        str | None,
        typer.Option(help="Rows that decode together, e.g. 1,4,16; the advice is for the fewest. [default: 1]"),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of the text before. [default: 128]", min=2)] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: as many as make plain decoding fastest.", min=1)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as stored.")] = None,
    device: Device = "auto",
    template_argument: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the chat template, as the data was made with.")
    ] = None,
) -> None:
    """Say which draft would pay here, with which γ, and what it takes: or that none would, and why.

    Costs are measured on untrained drafts of the usual shapes, or read from a profile of another machine. Without
    pilots α is known only up to what a head leaves out; a pilot's learning curve gives it an interval.
    """
    from rich.console import Console
    from rich.table import Table

    from configs.files import write_json
    from configs.reader import read_pairs
    from distill.planning import PlanSettings, plan_for

    found = plan_for(
        PlanSettings(
            out=out, target=target, profile=profile, data=data, budget_tokens=budget_tokens, pilots=pilots,
            batch=batch, context=context, threads=threads, dtype=dtype, device=device,
            template_arguments=read_pairs(template_argument or []),
        )
    )  # fmt: skip
    write_json(out / "plan.json", found.model_dump(mode="json"))
    console = Console(soft_wrap=True, highlight=False, width=140)
    table = Table("draft", "c", "α ≤", "pays from α", "γ", "S", "interval", "hours", "cache GiB")
    for one in found.candidates:
        s = one.speedup
        table.add_row(
            one.name, f"{one.c:.3f}", f"{one.ceiling:.2f}", "–" if one.break_even is None else f"{one.break_even:.2f}",
            str(one.num_draft_tokens), f"{s.middle:.2f}" if one.piloted else "?", f"[{s.low:.2f}, {s.high:.2f}]",
            f"{one.hours:.1f}", f"{one.disk_gib:.1f}",
        )  # fmt: skip
    console.print(table)
    if len(found.by_batch) > 1:
        rows = Table("rows at once", "best draft", "γ", "pays from α", "S", title="by batch")
        for size, one in found.by_batch.items():
            pays = "–" if one.break_even is None else f"{one.break_even:.2f}"
            ends = f"[{one.speedup.low:.2f}, {one.speedup.high:.2f}]"
            rows.add_row(str(size), one.name, str(one.num_draft_tokens), pays, ends)
        console.print(rows)
    console.print(found.verdict, style="bold", markup=False)
    console.print(f"plan: {out / 'plan.json'}", markup=False)
