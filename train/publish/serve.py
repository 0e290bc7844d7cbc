"""The command that serves a target with its draft, engine by engine."""

import json
import shlex

ENGINES = ("transformers", "vllm", "sglang")


def serve_command(engine: str, kind: str, target: str, draft: str, gamma: int) -> str:
    """What to run, at γ drafted tokens a round. For transformers it is Python."""
    if engine == "vllm":
        method = "eagle3" if kind == "eagle3" else "draft_model"
        speculation = json.dumps({"method": method, "model": draft, "num_speculative_tokens": gamma})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculation)}"
    if engine == "sglang":
        algorithm = "EAGLE3" if kind == "eagle3" else "STANDALONE"
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(draft)} "
            f"--speculative-num-steps {gamma} --speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}"
        )
    return f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({_quoted(target)})
target = AutoModelForCausalLM.from_pretrained({_quoted(target)})
draft = AutoModelForCausalLM.from_pretrained({_quoted(draft)})
draft.generation_config.num_assistant_tokens = {gamma}
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
print(tokenizer.decode(output[0], skip_special_tokens=True))"""


def _quoted(name: str) -> str:
    return json.dumps(name)
