"""How a draft is used, engine by engine, with commands to copy."""

from collections.abc import Mapping
from typing import Any

from train.publish.card_metadata import hub_revision, hub_target
from train.publish.serve import serve_command

UNMEASURED_LENGTH = 3  # γ where no report recommends one
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def usage(block: Mapping[str, Any], draft_name: str) -> str:
    """The section of the card."""
    tokens = block.get("recommended_num_draft_tokens")
    has_length = isinstance(tokens, int) and tokens > 0
    target = hub_target(block) or "TARGET"
    revision = hub_revision(block)
    command = f"draftsmith decode --target {target}{f'@{revision}' if revision else ''} --draft {draft_name}"
    command += f" --num-draft-tokens {tokens}" if has_length else ""
    parts = ["## Usage", f'```bash\n{command} --prompt "Why is the sky blue?"\n```']
    if has_length:
        parts.insert(1, f"Recommended draft length: {tokens} tokens per round.")
    parts += _engines(block, target, draft_name, tokens if isinstance(tokens, int) and tokens > 0 else None)
    if block.get("kind") == "lm" and not block.get("vocabulary_map_hash"):
        parts.append(_transformers(target, revision, draft_name, tokens if has_length else None))
    return "\n\n".join(parts)


def _engines(block: Mapping[str, Any], target: str, draft_name: str, tokens: int | None) -> list[str]:
    """What serves it. A folder that was exported for one engine is shown with that one."""
    exported = block.get("export")
    made_for = exported.get("engine") if isinstance(exported, dict) else None
    if made_for and block.get("kind") == "lm":
        made_for = "any"  # one folder for all
    kind, gamma = str(block.get("kind")), tokens or UNMEASURED_LENGTH
    parts = []
    for engine, name in ENGINES.items():
        if made_for in (engine, "any"):
            lines = [serve_command(engine, kind, target, draft_name, gamma)]
        elif made_for is None:
            folder = f"draft-for-{engine}"
            lines = [
                f"draftsmith export {draft_name} {folder} --to {engine} --target {target}",
                serve_command(engine, kind, target, folder, gamma),
            ]
        else:
            continue
        text = "\n".join(lines)
        parts.append(f"{name}{'' if tokens else ' (draft length not measured)'}:\n\n```bash\n{text}\n```")
    return parts


def _transformers(target: str, revision: str | None, draft_name: str, tokens: int | None) -> str:
    length = f"draft.generation_config.num_assistant_tokens = {tokens}\n" if tokens else ""
    pinned = f', revision="{revision}"' if revision else ""
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{target}"{pinned})\n'
        f'target = AutoModelForCausalLM.from_pretrained("{target}"{pinned})\n'
        f'draft = AutoModelForCausalLM.from_pretrained("{draft_name}")\n{length}'
        'inputs = tokenizer("Why is the sky blue?", return_tensors="pt")\n'
        "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))\n```"
    )
