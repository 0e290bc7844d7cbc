"""A folder belongs to one configuration, and answers to one target."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.errors import UserError
from configs.reader import differing_keys, read_yaml
from decode.chat import template_fingerprint
from decode.models import Loaded, tokenizer_fingerprint


def check_output(output: Path, settings: BaseModel) -> None:
    """Raises UserError when `output` holds a run of other settings, or a draft of unknown ones."""
    saved = output / "config.yaml"
    if output.exists() and not output.is_dir():
        raise UserError(f"{output}: is a file; name a folder as output")
    if saved.is_file():
        different = differing_keys(read_yaml(saved), settings.model_dump(mode="json"))
        if different:
            raise UserError(
                f"{output}: holds another run (different: {', '.join(different)}); "
                "name another output or remove that folder"
            )
    elif (output / "draft").exists():
        raise UserError(f"{output}: holds a draft of unknown settings (no config.yaml); name another output")


def target_identity(target: Loaded) -> dict[str, str]:
    """What must be the same for answers of a target to be answers of this target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
        "chat_template_hash": template_fingerprint(target.tokenizer),
    }


def provenance_path(answers: Path) -> Path:
    """The file beside an answers file that says which target wrote it, and how."""
    return answers.with_suffix(".provenance.json")


def check_answers(answers: Path, target: Loaded) -> None:
    """Raises UserError when there are no answers, or when they say that another target wrote them."""
    if not answers.is_file():
        raise UserError(f"{answers}: no such file; `draftsmith data` makes it (same --config)")
    beside = provenance_path(answers)
    if beside.is_file():
        theirs: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))["target"]
        # The same weights under another path are the same target.
        different = differing_keys(target_identity(target) | {"name": None}, theirs | {"name": None})
        if different:
            raise UserError(f"{answers}: written by another target (different: {', '.join(different)})")
