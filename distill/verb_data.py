"""The verb `data`: the target answers prompts."""

import json
from typing import Annotated

import typer

from configs.command_line import Config, Device, Dtype, Endpoint, Overrides, ServedModel


def data(
    overrides: Overrides = None,
    config: Config = None,
    target: Annotated[str | None, typer.Option(help="Short for target=...")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="Short for data.prompts=... Without prompts the target writes them itself."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Short for data.answers=..., the JSONL file to write.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Short for data.temperature=..., 0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Short for data.max_new_tokens=...")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for seed=...")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    endpoint: Endpoint = None,
    served_model: ServedModel = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at a time.", min=1, show_default="16")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every resolved setting as YAML, and stop.")
    ] = False,
) -> None:
    """Let the target answer prompts, for a draft to learn from: batched, and resumable row by row."""
    from configs.errors import UserError
    from configs.reader import read_config, to_yaml
    from decode.models import describe_model, load_model
    from distill.answers import with_template, write_answers
    from distill.engine import Engine
    from distill.job_settings import JobSettings

    if endpoint and (dtype, device) != ("auto", "auto"):
        raise UserError("--dtype and --device have no effect with --endpoint: the server has the model")
    if not endpoint and (served_model or concurrency):
        raise UserError("--served-model and --concurrency have no effect without --endpoint")
    short = {
        "target": target,
        "seed": seed,
        "data.prompts": prompts,
        "data.answers": out,
        "data.temperature": temperature,
        "data.max_new_tokens": max_new_tokens,
    }
    named = [f"{key}={json.dumps(value)}" for key, value in short.items() if value is not None]
    settings = read_config(JobSettings, config, [*(overrides or []), *named])
    if print_config:
        print(to_yaml(settings), end="")
        return
    engine = Engine(endpoint, served_model or settings.target, concurrency or 16) if endpoint else None
    loaded = describe_model(settings.target) if engine else load_model(settings.target, dtype, device)
    if engine:
        engine.check_target(loaded)
    count = write_answers(with_template(loaded, settings.data), settings.data, settings.seed, engine)
    print(f"{settings.data.answers}: {count} answers")
