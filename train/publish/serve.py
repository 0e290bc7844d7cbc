"""The command that serves a target with its draft, engine by engine."""

import json
import shlex
from pathlib import Path

UNMEASURED_LENGTH = 3  # γ where no report recommends one


def serve_command(
    engine: str, kind: str, target: str, draft: str, length: int | None, has_encoder: bool = False
) -> str:  # fmt: skip
    """What to run, at `length` drafted tokens a round, or at what engines need where none was measured.

    For transformers it is Python. `target` may be a Hub id@revision.
    """
    gamma = length or UNMEASURED_LENGTH
    name, _, revision = (target, "", "") if Path(target).exists() else target.partition("@")
    served, pinned = shlex.quote(name), f" --revision {shlex.quote(revision)}" if revision else ""
    if engine == "vllm":
        method = "eagle3" if kind == "eagle3" else "draft_model"
        speculation = json.dumps({"method": method, "model": draft, "num_speculative_tokens": gamma})
        return f"vllm serve {served}{pinned} --speculative-config {shlex.quote(speculation)}"
    if engine == "sglang":
        algorithm = "EAGLE3" if kind == "eagle3" else "STANDALONE"
        return (
            f"python -m sglang.launch_server --model-path {served}{pinned} "
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(draft)} "
            f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}"
        )
    source = json.dumps(name) + (f", revision={json.dumps(revision)}" if revision else "")
    loader = "AutoModelForSeq2SeqLM" if has_encoder else "AutoModelForCausalLM"
    measured = [f"draft.generation_config.num_assistant_tokens = {length}"] if length else []
    return "\n".join(
        [
            f"from transformers import {loader}, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({source})",
            f"target = {loader}.from_pretrained({source})",
            f"draft = {loader}.from_pretrained({json.dumps(draft)})",
            *measured,
            'inputs = tokenizer("Why is the sky blue?", return_tensors="pt")',
            "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
    )
