"""`python -m distill` under FSDP2 without a GPU: accelerate only shards for processes that it takes for GPU ones."""

import sys
from pathlib import Path

import accelerate.state

sys.path[0] = str(Path(__file__).resolve().parent.parent)
accelerate.state.PartialState._prepare_backend = lambda *_, **__: ("gloo", accelerate.state.DistributedType.MULTI_GPU)

from configs.command_line import run_verb  # noqa: E402
from distill.verb_distill import distill  # noqa: E402

run_verb(distill)
