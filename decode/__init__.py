"""The pair: loading, chat rendering, laws, verification, caches and lossless generation.

target = decode.load_model("models/smollm2-135m-instruct")
draft = decode.load_draft(target, "runs/demo/draft")
answer = decode.generate(target, draft, "Why is the sky blue?", temperature=0.7, seed=1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.answer import Answer, generate, generate_batch, stream
    from decode.drafts.kinds import load_draft
    from decode.models import load_model
    from decode.prompt_cache import PromptCache

ROOMS = {
    "Answer": "decode.answer", "generate": "decode.answer", "generate_batch": "decode.answer",
    "stream": "decode.answer",
    "PromptCache": "decode.prompt_cache", "load_draft": "decode.drafts.kinds", "load_model": "decode.models",
}  # fmt: skip
__all__ = ["Answer", "PromptCache", "generate", "generate_batch", "load_draft", "load_model", "stream"]


def __getattr__(name: str) -> Any:
    # On first use: the command line should not wait for torch to say --help.
    if name in ROOMS:
        return getattr(import_module(ROOMS[name]), name)
    raise AttributeError(f"module 'decode' has no attribute {name!r}")
