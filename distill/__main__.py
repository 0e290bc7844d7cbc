"""`python -m distill`, `accelerate launch -m distill`, and `accelerate launch distill` from the checkout."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: `python distill`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from configs.command_line import run_verb
from distill.verb_distill import distill

if __name__ == "__main__":
    run_verb(distill)
