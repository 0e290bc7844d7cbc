"""A folder belongs to one configuration, and answers to one target."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.errors import UserError
from configs.files import write_json
from configs.provenance import provenance
from configs.reader import differing_keys, read_config
from decode.chat import template_fingerprint
from decode.laws import Law
from decode.models import Loaded, tokenizer_fingerprint

# What decides how a run is done, not what comes out of it; the folder may be spelt or moved otherwise.
FREE = {
    "output", "teacher", "chunk_tokens", "train.micro_rows", "train.activation_checkpointing", "train.save_every",
    "train.keep_checkpoints", "train.max_minutes", "train.tracker", "push_to", "push_private",
}  # fmt: skip


def check_output(output: Path, settings: BaseModel) -> None:
    """Raises UserError when `output` holds a run of other settings, or a draft of unknown ones."""
    saved = output / "config.yaml"
    if output.exists() and not output.is_dir():
        raise UserError(f"{output}: is a file; name a folder as output")
    if saved.is_file():
        # What an older version did not know yet stands at its default.
        before = read_config(type(settings), saved)
        different = differing_keys(before.model_dump(mode="json"), settings.model_dump(mode="json"))
        different = [key for key in different if key not in FREE]
        if different:
            raise UserError(
                f"{output}: holds another run (different: {', '.join(different)}); "
                "name another output or remove that folder"
            )
    elif (output / "draft").exists():
        raise UserError(f"{output}: holds a draft of unknown settings (no config.yaml); name another output")


def check_inputs(output: Path, inputs: dict[str, str]) -> None:
    """A run goes on, or is finished, with the inputs it began with. Raises UserError naming those that changed."""
    saved = output / "inputs.json"
    if saved.is_file():
        different = differing_keys(json.loads(saved.read_text(encoding="utf-8")), inputs)
        if different:
            raise UserError(
                f"{output}: this run began with other inputs (changed: {', '.join(different)}); name another output"
            )


def target_identity(target: Loaded) -> dict[str, str]:
    """What must be the same for answers of a target to be answers of this target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
        "chat_template_hash": template_fingerprint(target.tokenizer, target.template_arguments),
    }


def provenance_path(answers: Path) -> Path:
    """The file beside an answers file that says which target wrote it, and how."""
    return answers.with_suffix(".provenance.json")


def made_by(answers: Path) -> dict[str, Any] | None:
    """How answers were sampled; None where nothing beside them says so."""
    beside = provenance_path(answers)
    if not beside.is_file():
        return None
    said = json.loads(beside.read_text(encoding="utf-8")).get("settings", {})
    return {name: said[name] for name in ("temperature", "top_k", "top_p", "samples", "greedy_too") if name in said}


def check_answers(answers: Path, target: Loaded, law: Law) -> None:
    """Raises UserError when there are no answers, or when another target or another law made them."""
    if not answers.is_file():
        raise UserError(f"{answers}: no such file; `draftsmith data` makes it (same --config)")
    beside = provenance_path(answers)
    if beside.is_file():
        said: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        theirs = said["target"]
        # The same weights under another path are the same target.
        different = differing_keys(target_identity(target) | {"name": None}, theirs | {"name": None})
        if different:
            raise UserError(f"{answers}: written by another target (different: {', '.join(different)})")
        for name in ("temperature", "top_k", "top_p"):
            made, asked = said["settings"].get(name), getattr(law, name)
            if made != asked:
                raise UserError(
                    f"{answers}: sampled with {name} {made}, but data.{name} is {asked}; acceptance would be measured "
                    f"under a law that the answers do not follow. Set data.{name}={made}"
                )


def claim_file(path: Path, target: Loaded, settings: dict[str, Any]) -> None:
    """Write FILE.provenance.json, or check that it says the same. Raises UserError for another run's file."""
    ours = {"target": target_identity(target), "settings": settings}
    beside = provenance_path(path)
    if beside.is_file():
        theirs = json.loads(beside.read_text(encoding="utf-8"))
        different = differing_keys(ours, {key: theirs.get(key) for key in ours})
        if different:
            raise UserError(
                f"{path}: holds answers made with another {', '.join(different)}; name another file or remove this one"
            )
    elif path.exists():
        raise UserError(f"{path}: exists without {beside.name}, so it is not ours to continue; name another file")
    else:
        write_json(beside, ours | {"made_with": provenance()})
