"""The verb `distill`: train a draft."""

from typing import Annotated

import typer

from configs.command_line import Config, Overrides


def distill(
    overrides: Overrides = None,
    config: Config = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every resolved setting as YAML, and stop.")
    ] = False,
) -> None:
    """Distil a draft from its target: one process, or any number under `accelerate launch`.

    Defaults < YAML < overrides. The draft with the best held-out acceptance ends in OUTPUT/draft; a killed run
    goes on from its last checkpoint when it is started again.
    """
    from configs.reader import read_config, to_yaml
    from distill.job import JobSettings, run

    settings = read_config(JobSettings, config, overrides or [])
    if print_config:
        print(to_yaml(settings), end="")
        return
    run(settings)
