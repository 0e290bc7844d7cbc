"""The verb `profile`: what decoding costs on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from configs.command_line import Device, Dtype


def profile(
    target: Annotated[str, typer.Option(help="Target: a folder, a Hub id[@revision] or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    draft: Annotated[
        str | None, typer.Option(help="Draft whose costs are measured. Default: untrained ones of the usual shapes.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Rows that decode together, e.g. 1,4,16.")] = "1",
    context: Annotated[int, typer.Option(help="Tokens of the text before.", min=2)] = 128,
    longest: Annotated[int, typer.Option(help="Verifying is timed for 1 to this many tokens.", min=2)] = 32,
    temperature: Annotated[float, typer.Option(help="Drawing tokens costs more than taking the best, 0.", min=0)] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as make plain decoding fastest.", min=0)] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure a plain step, v(n), a draft step and the rest of a round: medians with intervals, taken in turn.

    The file is what `eval --latency-profile`, `decode --num-draft-tokens auto` and `plan --profile` go by: measured
    once, on an idle machine, and frozen.
    """
    from rich.console import Console
    from rich.table import Table

    from configs.command_line import whole_numbers
    from configs.errors import UserError
    from configs.files import write_json
    from decode.drafts.kinds import draft_revision, load_draft
    from decode.laws import Law
    from decode.models import load_model
    from distill.profiling import measure_profile, usual_shapes

    if out.suffix != ".json":
        raise UserError(f"--out {out}: expected a name that ends in .json")
    batches = whole_numbers("--batch", batch)
    loaded = load_model(target, dtype, device)
    drafted = load_draft(loaded, draft, dtype, device) if draft else None
    revision = draft_revision(draft) if draft else None
    run_dtype = str(loaded.model.dtype).removeprefix("torch.")
    asked = {"target": target, "draft": draft, "draft_revision": revision, "batch": batches, "run_dtype": run_dtype}
    shapes = {} if drafted else usual_shapes(loaded)
    law = Law(temperature, vocabulary=loaded.vocabulary)
    found = measure_profile(loaded, drafted, shapes, law, context, batches, longest - 1, threads, asked)
    write_json(out, found.model_dump(mode="json"))
    console = Console(soft_wrap=True, highlight=False)
    costs = found.latency
    console.print(f"plain step {1000 * costs.plain_step_s:.2f} ms, c {costs.c:.3f}, o {costs.o:.3f} plain steps")
    widths = Table("rows", *(f"v({n})" for n in (1, 2, 4, 8, 16, 32) if n <= longest), title="verifying n tokens")
    for rows, latency in {1: costs, **found.batches}.items():
        widths.add_row(str(rows), *(f"{latency.verify_by_width[n]:.2f}" for n in (1, 2, 4, 8, 16, 32) if n <= longest))
    console.print(widths)
    if found.shapes:
        table = Table("shape", "weights", "c", "95 % interval", "o", title="untrained drafts")
        for shape in found.shapes:
            ends = f"[{shape.c_ci[0]:.3f}, {shape.c_ci[1]:.3f}]"
            table.add_row(shape.name, f"{shape.weights / 1e6:.1f}M", f"{shape.c:.3f}", ends, f"{shape.o:.3f}")
        console.print(table)
    console.print(f"profile: {out}", markup=False)
