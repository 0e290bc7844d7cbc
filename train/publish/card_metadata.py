"""What the Hub reads of a model card: whose draft it is, tags, and the measured figures as a model index."""

import math
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

# Pages of the site, so nobody's namespace there: `models/my-target` is a folder, not a Hub id.
RESERVED_NAMESPACES = {"models", "datasets", "spaces"}
TAGS = ["speculative-decoding", "draft-model", "draftsmith"]
FIGURES = {  # key of the verdict: what it is called
    "alpha": "acceptance α",
    "tau": "tokens per target pass τ",
    "speedup_decode": "speed-up, decoding",
    "speedup_e2e": "speed-up, end to end",
}


def metadata(block: Mapping[str, Any], report: Mapping[str, Any], draft_name: str) -> ModelCardData:
    """The card's head. Figures stand in it only where the report's certificate says that decoding was lossless."""
    results = _results(report)
    # Only a plain LM loads with transformers alone; the Hub shows a loading snippet for what is named here.
    is_plain = block.get("kind") == "lm" and not block.get("vocabulary_map_hash")
    return ModelCardData(
        base_model=hub_target(block),
        license=block.get("license"),
        library_name="transformers" if is_plain else None,
        pipeline_tag="text-generation",
        tags=[*TAGS, *(["eagle3"] if block.get("kind") == "eagle3" else [])],
        model_name=draft_name.split("/")[-1] if results else None,
        eval_results=results or None,
    )


def _results(report: Mapping[str, Any]) -> list[EvalResult]:
    verdict, settings, where = (mapping(report, name) for name in ("verdict", "settings", "provenance"))
    if verdict.get("lossless") is not True:
        return []
    names = ("num_draft_tokens", "temperature", "top_k", "top_p", "max_new_tokens", "verifier", "run_dtype", "threads")
    how = {name: settings[name] for name in names if settings.get(name) is not None}
    how |= {name: where[name] for name in ("device", "processor", "cores") if where.get(name) is not None}
    how |= {f"{name}_version": version for name, version in mapping(where, "versions").items() if version}
    suite = PureWindowsPath(str(settings.get("suite", "suite"))).name
    said = report.get("prompts")
    prompts = said if isinstance(said, list) else []
    return [
        EvalResult(
            task_type="text-generation", task_name="speculative decoding", dataset_type=f"draftsmith-{suite}",
            dataset_name=f"{suite}, {len(prompts)} prompts", metric_type=key, metric_name=name,
            metric_value=round(verdict[key], 4), metric_args=how,
        )
        for key, name in FIGURES.items()
        if _is_number(verdict.get(key))
    ]  # fmt: skip


def mapping(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a JSON object that is one itself; empty where it is none."""
    value = tree.get(name)
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def hub_target(block: Mapping[str, Any]) -> str | None:
    """The target's id when it can only be a Hub id; None for a local folder, whatever it is called."""
    target = block.get("target")
    if not isinstance(target, str) or target.count("/") != 1 or Path(target).is_dir():
        return None
    try:
        validate_repo_id(target)
    except HFValidationError:
        return None
    return None if target.split("/")[0] in RESERVED_NAMESPACES else target


def hub_revision(block: Mapping[str, Any]) -> str | None:
    """The target's commit; None where only a fingerprint of local files is known, which nobody can download."""
    revision = str(block.get("target_revision") or "")
    return revision if revision and hub_target(block) and not revision.startswith("local-") else None


def target_name(block: Mapping[str, Any]) -> str:
    target = str(block.get("target") or "")
    # PureWindowsPath splits at both kinds of slash.
    return hub_target(block) or PureWindowsPath(target).name or "TARGET"
