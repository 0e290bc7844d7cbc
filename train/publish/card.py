"""The model card of a draft folder: what was measured and what follows from it, nothing else.

Read: config.json (its `draftsmith` block), and where they exist report.json and training.json.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard

from configs.errors import UserError
from configs.files import write_text
from train.publish.card_metadata import hub_revision, hub_target, mapping, metadata, target_name
from train.publish.card_usage import usage

logger = logging.getLogger(__name__)

MARK = "<!-- Written by draftsmith from the files beside it. Remove this line to keep a text of your own. -->"

LOCAL_PATH = re.compile(r"(?<![\w./\\>-])(?:file://|~|[A-Za-z]:)?[/\\](?!/)[^\s\"'`,;)\]]+")
PRIVATE_FACTS = {"host", "hostname", "user", "username", "cwd", "argv", "command", "env", "token", "api_key"}

NOT_MEASURED = "not measured"
RELATION = {
    "eagle3": "It is a head on the target's hidden states (EAGLE-3), and no language model by itself. ",
    "lm": "It is a small language model with the target's tokenizer. ",
}


def card(folder: Path, *, repo_id: str | None = None) -> ModelCard:
    """The card of the draft in `folder`; with `repo_id` its examples name that repository.

    Raises UserError when config.json has no `draftsmith` block or a JSON file is broken. A missing
    report.json makes the card say that nothing was measured.
    """
    block = draft_block(folder)
    report = _read_json(folder / "report.json") or {}
    training = _read_json(folder / "training.json") or {}
    draft_name = repo_id or "DRAFT"
    sections = [
        _introduction(block, draft_name),
        _verdict(report),
        _how_measured(report),
        _how_trained(training),
        usage(block, draft_name),
        _limits(block),
        MARK,
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{metadata(block, report, draft_name).to_yaml()}\n---\n\n{body}\n")


def write_card(folder: Path, *, repo_id: str | None = None) -> None:
    """Write README.md into the draft folder in one rename; a README.md by another hand is left as it is.

    Raises UserError for the reasons of `card`, and when the folder can't be written to.
    """
    path = folder / "README.md"
    text = str(card(folder, repo_id=repo_id))
    try:
        if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            logger.warning("%s was not written by draftsmith: it is kept as it is", path)
            return
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path}: the card can't be written ({error.strerror}); make it writable") from error


def draft_block(folder: Path) -> dict[str, Any]:
    """The `draftsmith` block of the folder's config.json. Raises UserError when there is none."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise UserError(f"{folder}: no config.json; expected a draft folder as a training run writes it")
    block = config.get("draftsmith")
    if not isinstance(block, dict):
        raise UserError(
            f"{folder / 'config.json'}: no `draftsmith` block, so this is not a draft folder; "
            "expected one as a training run writes it"
        )
    return block


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); write it again or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _introduction(block: Mapping[str, Any], draft_name: str) -> str:
    title = draft_name.split("/")[-1] if draft_name != "DRAFT" else f"Draft for {target_name(block)}"
    on_hub = hub_target(block)
    target = f"[{on_hub}](https://huggingface.co/{on_hub})" if on_hub else f"`{target_name(block)}`"
    commit = hub_revision(block)
    revision = f" at revision `{_public(commit)}`" if commit else ""
    kind = str(block.get("kind", "unknown"))
    return (
        f"# {title}\n\nA draft model (kind `{_public(kind)}`) for speculative decoding with {target}{revision}, "
        f"made with Draftsmith. {RELATION.get(kind, '')}The answers stay the target's own, whatever the draft proposes."
    )


def _verdict(report: Mapping[str, Any]) -> str:
    verdict = mapping(report, "verdict")
    if not verdict:
        return f"## Verdict\n\nAcceptance and speed-up: {NOT_MEASURED}."
    if verdict.get("lossless") is not True:
        reason = "not lossless" if verdict.get("lossless") is False else "losslessness was not certified"
        return f"## Verdict\n\n{reason}: no speed-up is claimed."
    rows = [
        ("lossless", "yes"),
        ("speed-up, decoding", _times(verdict.get("speedup_decode"), verdict.get("speedup_decode_ci"))),
        ("speed-up, end to end", _times(verdict.get("speedup_e2e"), verdict.get("speedup_e2e_ci"))),
        ("τ, tokens per target pass", _number(verdict.get("tau"))),
        ("α, acceptance", _number(verdict.get("alpha"))),
    ]
    table = "| quantity | value |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"## Verdict\n\n{table}"


def _how_measured(report: Mapping[str, Any]) -> str:
    if not mapping(report, "verdict"):
        return ""
    facts = [fact for name in ("settings", "latency", "provenance") for fact in _facts(mapping(report, name))]
    return (
        "## How it was measured\n\n"
        "Plain and speculative decoding ran over the same prompts; a speed-up is plain time ÷ speculative "
        "time, its interval a paired bootstrap over prompts. τ counts the target's own token; α is the sum "
        "of min(p, q) over the vocabulary; c, v and o are the times of a draft step, of verification and of "
        "other work, each ÷ a plain step. Everything measured is in `report.json`.\n\n" + "\n".join(facts)
    ).rstrip()


def _how_trained(training: Mapping[str, Any]) -> str:
    if not training:
        return ""
    facts = _facts({key: value for key, value in training.items() if not isinstance(value, dict)})
    said = "The resolved configuration is in `training.json`."
    return "\n".join(["## How it was trained", "", f"{_data(training)}{said}", "", *facts])


def _data(training: Mapping[str, Any]) -> str:
    """Whose words it learned from, and which of them counted: no more than the record of the answers says."""
    data, made = mapping(mapping(training, "config"), "data"), mapping(training, "answers")
    if not data:
        return ""
    text = "The origin of the training text is not recorded. "
    if made:
        temperature = made.get("temperature")
        sampled = "greedily" if temperature == 0 else f"at temperature {_public(temperature)}"
        sampled += " and greedily" if made.get("greedy_too") and temperature != 0 else ""
        prompts = f"prompts `{_public(data['prompts'])}`" if data.get("prompts") else "prompts that it wrote itself"
        own = data.get("self_prompts") if data.get("prompts") else 0
        prompts += f" and {own} that it wrote itself" if own else ""
        text = f"Training text: the target's own answers, {sampled}, to {prompts}. "
    counted = "the last answer of a chat" if data.get("mask") == "last" else "every answer's tokens"
    counted = "all of the text" if data.get("text") else f"{counted}, nothing of a prompt"
    rollouts = mapping(mapping(training, "config"), "on_policy").get("fraction")
    return f"{text}Supervised: {counted}. " + ("Part of it was rolled out while training. " if rollouts else "")


def _limits(block: Mapping[str, Any]) -> str:
    lines = [
        "- It is made for this target. With another one, even of the same family, acceptance is not known.",
        "- A speed-up holds for the machine, dtype, batch size and prompts it was measured on.",
    ]
    if block.get("target_weights"):
        lines.append(f"- The target's weights it was trained and measured against: {_public(block['target_weights'])}.")
    if block.get("chat_template_hash"):
        template = _public(block["chat_template_hash"])
        lines.append(f"- It expects prompts rendered with the chat template of hash `{template}`.")
    if block.get("tokenizer_fingerprint"):
        lines.append(f"- It needs the tokenizer of fingerprint `{_public(block['tokenizer_fingerprint'])}`.")
    if not block.get("license"):
        lines.append("- Its licence is not stated; the target's terms apply to what is derived from it.")
    return "## Limits\n\n" + "\n".join(lines)


def _facts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One bullet per value of a nested mapping, under its dotted name; what says who or where is left out."""
    for key, value in tree.items():
        if key.lower() in PRIVATE_FACTS or value is None:
            continue
        if isinstance(value, dict):
            yield from _facts(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            if value and not any(isinstance(item, (dict, list)) for item in value):
                yield f"- {prefix}{key}: `{', '.join(_public(item) for item in value)}`"
        else:
            yield f"- {prefix}{key}: `{_public(value)}`"


def _public(value: Any) -> str:
    """The value on one line, local paths cut to their last name: a card shows nobody's folders."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return LOCAL_PATH.sub(lambda match: PureWindowsPath(match[0]).name, text).replace("`", "'").replace("|", "/")


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return NOT_MEASURED
    return f"{value:.2f}"


def _times(value: Any, interval: Any) -> str:
    text = _number(value)
    if text == NOT_MEASURED:
        return text
    bounds = [_number(bound) for bound in interval] if isinstance(interval, list) else []
    return f"{text}×" + (f" [{bounds[0]}, {bounds[1]}]" if len(bounds) == 2 and NOT_MEASURED not in bounds else "")
