"""`python -m decode`: one answer, with or without a draft."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: `python decode`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from configs.command_line import run_verb
from decode.verb_decode import decode

if __name__ == "__main__":
    run_verb(decode)
