"""The verb `data vocabulary`: what a head over part of the vocabulary would cost, before a draft is trained."""

from typing import Annotated

import typer

from configs.command_line import Config, Overrides


def vocabulary(
    overrides: Overrides = None,
    config: Config = None,
    sizes: Annotated[str, typer.Option(help="Numbers of ids to try.")] = "1024,2048,4096,8192,16384,32768",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print the coverage curve: ids are counted in the training answers, the loss is measured on the held-out ones.

    α at T = 1 can be no more than the mean mass of the target's law inside the cut; at T = 0 no more than the share
    of places whose best token lies inside.
    """
    import json

    import torch
    from rich.console import Console
    from rich.table import Table

    from configs.command_line import whole_numbers
    from configs.reader import read_config
    from decode.laws import Law
    from decode.models import load_model
    from distill.answers import with_template
    from distill.job import read_data
    from distill.job_settings import JobSettings
    from distill.rows import split_held_out
    from distill.teacher import Teacher
    from distill.vocabulary import ceilings, choose_ids, count_tokens, kept_always

    settings = read_config(JobSettings, config, overrides or [])
    wanted = whole_numbers("--sizes", sizes)
    target = with_template(load_model(settings.target, settings.teacher_dtype), settings.data)
    rows, held_out = split_held_out(
        read_data(settings, target), settings.data.held_out_rows, settings.data.held_out_seed
    )
    counts = count_tokens(rows, target.model.config.vocab_size)
    always, tokens = kept_always(target, counts), len(target.tokenizer)
    cuts = [choose_ids(counts, size, always, tokens) for size in wanted if size <= tokens]
    found = ceilings(Teacher(target.model), held_out, cuts, torch.device(target.model.device), Law(1.0))
    if as_json:
        print(json.dumps({"different_ids_in_answers": int((counts > 0).sum()), "cuts": [vars(cut) for cut in found]}))
        return
    table = Table("ids", "own tokens inside", "α ≤ at T = 1", "α ≤ at T = 0", title=f"{settings.data.answers}")
    for cut in found:
        table.add_row(str(cut.size), *(f"{share:.2%}" for share in (cut.coverage, cut.alpha_sampled, cut.alpha_greedy)))
    Console().print(table)
    Console().print(f"{int((counts > 0).sum())} different ids in the answers; the head has {tokens}.")
