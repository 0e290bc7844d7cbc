"""Checks of a draft folder's files: what is there, whole, and safe to load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from configs.files import without_local_paths
from decode.adapters import ADAPTER_CONFIG
from decode.trust import INDEX, PICKLE_SUFFIXES, WEIGHTS, is_plain_name
from train.publish.findings import DraftFolder, Finding, note

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
RETRAIN = "write the folder again, from its training run or with `draftsmith export`"


def read_folder(path: Path, names: list[str]) -> tuple[DraftFolder | None, list[Finding]]:
    """The folder, or None where it cannot be read any further, and what is wrong with its files.

    `names` are those of all its files, also of those that were not fetched.
    """
    findings = list(_unsafe_files(names))
    config, wrong = _read_object(path / "config.json")
    weights = [(path / file).is_file() for file in (WEIGHTS, INDEX)]
    if (path / ADAPTER_CONFIG).is_file() and not any(weights):
        how = f"draftsmith merge {path.name} OUT"
        return None, [*findings, Finding("an adapter alone", "No engine finds a model in it", how)]
    if config is None:
        return None, [*findings, wrong] if wrong else findings
    files, broken = _weight_files(path)
    findings += broken
    if files is None:
        return None, findings
    return DraftFolder(path, config, files), findings


def file_checks(folder: DraftFolder) -> Iterator[Finding]:
    """What is wrong with dtypes, values and the general fields of config.json."""
    yield from _dtypes(folder)
    yield from _values(folder)
    yield from _rope(folder)
    config = folder.config
    if config.get("auto_map"):
        yield Finding(
            "config.json has auto_map", "It makes loaders run Python that came with the folder",
            "remove auto_map and the .py files; the architectures that engines know need neither",
        )  # fmt: skip
    left_over = config.get("quantization_config")
    if left_over and all(header.is_float for header in folder.headers.values()):
        yield Finding(
            "config.json has a quantization_config, but the weights are plain floats",
            "Loaders take the model for quantised and refuse to train, save or serve it",
            "remove quantization_config",
        )  # fmt: skip
    if without_local_paths(dict(config)) != dict(config):
        yield note(
            "config.json holds an absolute path", "It shows a folder of the machine it was made on", "cut it to a name"
        )


def _unsafe_files(names: list[str]) -> Iterator[Finding]:
    pickled = [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]
    if pickled:
        yield Finding(
            f"pickled files: {', '.join(pickled)}", "Loading one runs whatever code it holds",
            "save the tensors as safetensors and remove the file",
        )  # fmt: skip
    code = [name for name in names if name.endswith(".py")]
    if code:
        yield Finding(
            f"Python files: {', '.join(code)}",
            "With trust_remote_code a loader runs them",
            "remove them from the folder",
        )


def _read_object(path: Path) -> tuple[dict[str, Any] | None, Finding | None]:
    if not path.is_file():
        return None, Finding(f"no {path.name}", "Nothing says what the weights are", RETRAIN)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return None, Finding(f"{path.name} is not JSON ({error})", "Nothing can read it", RETRAIN)
    if not isinstance(content, dict):
        return None, Finding(f"{path.name} holds a {type(content).__name__}", "An object is expected", RETRAIN)
    return content, None


def _weight_files(path: Path) -> tuple[dict[str, Path] | None, list[Finding]]:
    """Each tensor's file; None, and why, where they cannot be had."""
    if not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file():
            return None, [Finding(f"no {WEIGHTS}", "There are no weights that are safe to load", RETRAIN)]
        names, wrong = _names_in(path / WEIGHTS)
        return (None, [wrong]) if wrong else (dict.fromkeys(names, path / WEIGHTS), [])
    index, wrong = _read_object(path / INDEX)
    said = (index or {}).get("weight_map")
    if wrong or not isinstance(said, dict) or not all(isinstance(shard, str) for shard in said.values()):
        return None, [wrong or Finding(f"{INDEX} has no weight_map", "Loaders find no tensor", RETRAIN)]
    outside = sorted({shard for shard in said.values() if not is_plain_name(shard)})
    if outside:
        why = "A loader that follows it reads a file of the machine that has nothing to do with the draft"
        return None, [Finding(f"{INDEX} points outside of the folder: {outside[0]}", why, "do not use this folder")]
    held: dict[str, Path] = {}
    for shard in sorted(set(said.values())):
        if not (path / shard).is_file():
            return None, [Finding(f"no {shard}, which {INDEX} names", "A part of the weights is missing", RETRAIN)]
        names, wrong = _names_in(path / shard)
        if wrong:
            return None, [wrong]
        held |= dict.fromkeys(names, path / shard)
    lost = sorted(name for name, shard in said.items() if held.get(name) != path / shard)
    if lost:
        return None, [Finding(f"{lost[0]} is not in the shard that {INDEX} names", "Loaders do not find it", RETRAIN)]
    return held, []


def _names_in(path: Path) -> tuple[list[str], Finding | None]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys()), None
    except (SafetensorError, OSError) as error:
        return [], Finding(f"{path.name} is not a whole safetensors file ({error})", "Nothing can load it", RETRAIN)


def _dtypes(folder: DraftFolder) -> Iterator[Finding]:
    if folder.config.get("quantization_config"):
        return  # packed weights and their scales have dtypes of their own
    found = sorted({header.dtype for header in folder.headers.values() if header.is_float})
    said = folder.config.get("dtype") or folder.config.get("torch_dtype")
    said = said or folder.mapping("transformer_layer_config").get("torch_dtype")
    if len(found) > 1:
        yield Finding(
            f"weights of several dtypes: {', '.join(found)}", "Loaders cast them all to one, which may round",
            "save the draft in one dtype",
        )  # fmt: skip
    elif found and isinstance(said, str) and said in STORED and [STORED[said]] != found:
        yield Finding(
            f"config.json says {said}, the weights are {found[0]}", "The engine rounds or widens what was measured",
            "write the dtype of the weights into config.json",
        )  # fmt: skip


def _rope(folder: DraftFolder) -> Iterator[Finding]:
    for fields in (folder.config, folder.mapping("transformer_layer_config")):
        parameters = fields.get("rope_parameters")
        base, said = fields.get("rope_theta"), parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if base is not None and said is not None and float(base) != float(said):
            yield Finding(
                f"RoPE base is written twice: rope_theta {base:g}, in rope_parameters {said:g}",
                "Each generation of transformers reads another one", "write the base it was trained with in both",
            )  # fmt: skip


def _values(folder: DraftFolder) -> Iterator[Finding]:
    for name, header in folder.headers.items():
        if header.is_float and not bool(torch.isfinite(folder.tensor(name).float()).all()):
            yield Finding(f"{name} holds NaN or infinity", "Every draft token is noise", "take an earlier checkpoint")
