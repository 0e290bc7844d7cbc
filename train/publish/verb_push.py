"""The verb `draftsmith push`."""

from pathlib import Path
from typing import Annotated

import typer


def push(
    folder: Annotated[Path, typer.Argument(help="The draft folder: config.json, model.safetensors, tokenizer.")],
    repo: Annotated[str, typer.Argument(help="The model repository to push to: NAME/REPO. Made when missing.")],
    private: Annotated[
        bool,
        typer.Option("--private", help="Make the repository private. Refused when it exists and is public."),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; made when missing. Default: main.")] = None,
) -> None:
    """Write the model card and push a draft folder to the Hub in one commit.

    The token comes from HF_TOKEN or `hf auth login`; HF_ENDPOINT names another Hub.
    \f
    Raises UserError when the folder is not a draft folder, the name is not NAME/REPO, there is no token, or
    the Hub refuses.
    """
    # Imported here so that --help does not wait for huggingface_hub.
    from train.publish import hub

    typer.echo(hub.push(folder, repo, private=private, revision=revision))
