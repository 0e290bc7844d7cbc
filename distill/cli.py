"""The console command `draftsmith`: every verb, each the same code as its `python -m` twin."""

from collections.abc import Callable
from typing import Annotated

import typer

from configs.command_line import run_verbs
from decode.verb_decode import decode
from distill.verb_cache import cache
from distill.verb_data import data
from distill.verb_distill import distill
from distill.verb_import import import_chats
from distill.verb_plan import plan
from distill.verb_profile import profile
from distill.verb_show import show
from distill.verb_vocabulary import vocabulary
from eval.verb_compare import compare
from eval.verb_eval import evaluate
from train.publish.verb_doctor import doctor
from train.publish.verb_export import export
from train.publish.verb_merge import merge
from train.publish.verb_push import push

VERBS: dict[str, Callable[..., None]] = {
    "data": data,
    "data cache": cache,
    "data import": import_chats,
    "data show": show,
    "data vocabulary": vocabulary,
    "distill": distill,
    "profile": profile,
    "plan": plan,
    "eval": evaluate,
    "compare": compare,
    "decode": decode,
    "merge": merge,
    "export": export,
    "doctor": doctor,
    "push": push,
}


def before(
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run the Python code that a model brings along. Default: refuse."),
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors. Default: refuse.")
    ] = False,
) -> None:
    """What is allowed for every verb."""
    if trust_remote_code or allow_pickle:
        from decode.trust import trust

        trust(trust_remote_code, allow_pickle)


def main() -> None:
    """Entry point of `draftsmith`."""
    run_verbs(VERBS, "Distil draft models for speculative decoding, and measure what they are worth.", before)
