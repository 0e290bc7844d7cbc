"""The verb `draftsmith doctor`."""

from typing import Annotated, Literal

import typer


def doctor(
    draft: Annotated[str, typer.Argument(help="A draft folder or a Hub id[@revision], ours or somebody else's.")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target, to compare tokenizer, sizes, layers, template with. Default: not compared."),
    ] = None,
    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        typer.Option("--for", help="Judge it for this engine. Default: the one that the folder is written for."),
    ] = None,
    trained: Annotated[
        str | None,
        typer.Option(help="The draft that an exported folder was made of: compares logits too, given --target."),
    ] = None,
) -> None:
    """Say what is wrong with a draft folder, why it matters and how to mend it, a line each; exits with 1 for a fault.

    \f
    Raises UserError when there is no such folder or target.
    """
    from train.publish.doctor import examine

    findings = examine(draft, target, trained, engine)
    for finding in sorted(findings, key=lambda finding: not finding.is_fault):
        typer.echo(finding.line())
    faults = sum(finding.is_fault for finding in findings)
    typer.echo(f"{draft}: {faults or 'no'} fault{'' if faults == 1 else 's'}")
    raise typer.Exit(1 if faults else 0)
