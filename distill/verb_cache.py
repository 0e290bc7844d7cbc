"""The verb `data cache`: the teacher's log-probabilities, once, on disk."""

from typing import Annotated

import typer

from configs.command_line import Config, Device, Endpoint, Overrides, ServedModel


def cache(
    overrides: Overrides = None,
    config: Config = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write it however large it is.")] = False,
    endpoint: Endpoint = None,
    served_model: ServedModel = None,
    device: Device = "auto",
) -> None:
    """Store the top log-probabilities of every supervised token, for `distill` with the same data and cache settings.

    Says how large it will be before it starts. A killed run goes on at its last whole shard.
    """
    import torch

    from configs.errors import UserError
    from configs.reader import read_config
    from decode.models import describe_model, load_model
    from distill.answers import with_template
    from distill.engine import Engine
    from distill.job import cache_identity, read_data
    from distill.job_settings import JobSettings
    from distill.logit_cache import ROWS_AT_ONCE, Score, check_taps, scored_by, whole_bytes, write_cache
    from distill.teacher import Teacher, check_plain_head

    if endpoint and device != "auto":
        raise UserError("--device has no effect with --endpoint: the server has the model")
    if served_model and not endpoint:
        raise UserError("--served-model has no effect without --endpoint")
    settings = read_config(JobSettings, config, overrides or [])
    if settings.cache.folder is None:
        raise UserError("cache.folder is not set: name the folder to write")
    score: Score
    if endpoint:
        target = with_template(describe_model(settings.target), settings.data)
        engine = Engine(endpoint, served_model or settings.target)
        engine.check_target(target)
        rows, score, at_once = read_data(settings, target), engine.score, engine.rows_at_once
    else:
        target = with_template(load_model(settings.target, settings.teacher_dtype, device), settings.data)
        rows, score, at_once = read_data(settings, target), scored_by(Teacher(target.model)), ROWS_AT_ONCE
        check_plain_head(target.model, torch.tensor([rows[0].ids], device=target.model.device), target.name)
    check_taps(settings.cache.taps, target.model.config)
    vocabulary = int(target.model.config.vocab_size)
    whole = whole_bytes(rows, settings.cache, target.model.config)
    gib = whole / 2**30
    typer.echo(f"{whole / sum(row.supervised for row in rows):.0f} bytes per supervised token, {gib:.3f} GiB in all")
    if gib > settings.cache.ask_above_gib and not yes:
        raise UserError(f"that is above cache.ask_above_gib {settings.cache.ask_above_gib:g}; repeat with --yes")
    identity, scorer = cache_identity(settings, target), "engine" if endpoint else "here"
    manifest = write_cache(score, rows, settings.cache, identity, vocabulary, scorer, at_once)
    typer.echo(f"{settings.cache.folder}: {manifest.tokens} tokens in {len(manifest.shards)} shards")
