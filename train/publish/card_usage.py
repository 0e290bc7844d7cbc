"""How a draft is used, engine by engine, with commands to copy."""

from collections.abc import Mapping
from typing import Any

from train.publish.card_metadata import hub_revision, hub_target
from train.publish.serve import serve_command

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def usage(block: Mapping[str, Any], draft_name: str) -> str:
    """The section of the card."""
    tokens = block.get("recommended_num_draft_tokens")
    length = tokens if isinstance(tokens, int) and tokens > 0 else None
    revision = hub_revision(block)
    target = (hub_target(block) or "TARGET") + (f"@{revision}" if revision else "")
    command = f"draftsmith decode --target {target} --draft {draft_name}"
    command += f" --num-draft-tokens {length}" if length else ""
    parts = ["## Usage", f'```bash\n{command} --prompt "Why is the sky blue?"\n```']
    if length:
        parts.insert(1, f"Recommended draft length: {length} tokens per round.")
    has_encoder = bool(block.get("encoder_decoder"))
    if not has_encoder:
        parts += _engines(block, target, draft_name, length)
    if block.get("kind") == "lm" and not block.get("vocabulary_map_hash"):
        snippet = serve_command("transformers", "lm", target, draft_name, length, has_encoder)
        parts.append(f"```python\n{snippet}\n```")
    return "\n\n".join(parts)


def _engines(block: Mapping[str, Any], target: str, draft_name: str, length: int | None) -> list[str]:
    """What serves it. A feature draft that was exported for one engine is shown with that one."""
    exported = block.get("export")
    made_for = exported.get("engine") if isinstance(exported, dict) else None
    kind, parts = str(block.get("kind")), []
    if made_for and kind == "lm":
        made_for = "any"  # one folder for all
    for engine, name in ENGINES.items():
        if made_for in (engine, "any"):
            lines = [serve_command(engine, kind, target, draft_name, length)]
        elif made_for is None:
            folder = f"draft-for-{engine}"
            lines = [
                f"draftsmith export {draft_name} {folder} --to {engine} --target {target}",
                serve_command(engine, kind, target, folder, length),
            ]
        else:
            continue
        text = "\n".join(lines)
        parts.append(f"{name}{'' if length else ' (draft length not measured)'}:\n\n```bash\n{text}\n```")
    return parts
