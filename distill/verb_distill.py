"""The verb `distill`: train a draft."""

import json
import sys
from typing import Annotated

import typer

from configs.command_line import Config, Overrides
from train.launching import LaunchName


def distill(
    overrides: Overrides = None,
    config: Config = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Go on from this draft instead of making one: sets draft.init, and the draft's kind and head. "
            "Default: as configured."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Supervised tokens to train on: train.max_tokens. Default: as configured.")
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Minutes to train: train.max_minutes. Default: as configured."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Checkpoints to keep: train.keep_checkpoints. Default: as configured.")
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME/REPO",
            help="Push the draft there at the end; the right to write is checked before training: "
            "sets push_to. Default: as configured.",
        ),
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private", help="With --push-to, a private repository. Default: as configured.")
    ] = None,
    launch: Annotated[
        LaunchName | None,
        typer.Option(
            help="Start several processes, as configs/accelerate/ says. Default: this one, or those of the launcher."
        ),
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="With --launch: how many. Default: one for each accelerator; 2 on a CPU.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every resolved setting as YAML, and stop.")
    ] = False,
) -> None:
    """Distil a draft from its target: one process, or any number with --launch or under `accelerate launch`.

    Defaults < YAML < overrides. The draft with the best held-out score ends in OUTPUT/draft; a killed run goes on from
    its last checkpoint when it is started again.
    """
    from configs.errors import UserError
    from configs.reader import read_config, to_yaml
    from distill.job import run
    from distill.job_settings import JobSettings
    from distill.shape import warm_start

    options = {"max_tokens": max_tokens, "max_minutes": max_time, "keep_checkpoints": keep}
    said = [f"train.{name}={value}" for name, value in options.items() if value is not None]
    said += [f"push_to={json.dumps(push_to)}"] if push_to is not None else []
    said += ["push_private=true"] if private else []
    settings = read_config(JobSettings, config, [*(warm_start(init) if init else []), *(overrides or []), *said])
    if print_config:
        print(to_yaml(settings), end="")
        return
    if num_processes and not launch:
        raise UserError("--num-processes goes with --launch; under a launcher it decides how many there are")
    if launch:
        from train.launching import launch as launch_processes

        verb = "distill" in sys.argv[1:4]  # draftsmith [--trust-...] distill, else python -m distill
        given = sys.argv[sys.argv.index("distill") + 1 :] if verb else sys.argv[1:]
        sys.exit(launch_processes(launch, num_processes, "distill", _without(given, "--launch", "--num-processes")))
    run(settings)


def _without(arguments: list[str], *options: str) -> list[str]:
    """The command line without some options and their values."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif not argument.startswith(tuple(f"{option}=" for option in options)):
            kept.append(argument)
    return kept
