"""The pair: loading, chat rendering, laws, verification, caches and lossless generation.

target = decode.load_model("models/smollm2-135m-instruct")
draft = decode.load_draft(target, "runs/demo/draft")
answer = decode.generate(target, draft, "Why is the sky blue?", temperature=0.7, seed=1)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.answer import Answer, generate, load_draft, stream
    from decode.models import load_model

__all__ = ["Answer", "generate", "load_draft", "load_model", "stream"]


def __getattr__(name: str) -> Any:
    # On first use: the command line should not wait for torch to say --help.
    if name in __all__:
        return getattr(import_module("decode.models" if name == "load_model" else "decode.answer"), name)
    raise AttributeError(f"module 'decode' has no attribute {name!r}")
