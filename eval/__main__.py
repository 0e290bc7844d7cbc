"""`python -m eval`: measure what a draft is worth."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: `python eval`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from configs.command_line import run_verb
from eval.verb_eval import evaluate

if __name__ == "__main__":
    run_verb(evaluate)
