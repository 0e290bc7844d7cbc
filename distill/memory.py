"""What to change when memory runs out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.errors import UserError
from distill.job_settings import JobSettings


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how an allocator, on the CPU or an accelerator, says that there is no more."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or bool(re.search("out of memory|can't allocate memory", str(error)))


@contextmanager
def memory_advice(settings: JobSettings, processes: int) -> Iterator[None]:
    """A run that needs more memory than there is ends with what would need less, largest saving first."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        micro_rows, chunk_tokens = settings.train.micro_rows, settings.chunk_tokens
        may_change = [
            f"train.micro_rows={micro_rows // 2}" if micro_rows > 1 else "",
            "" if settings.train.activation_checkpointing else "train.activation_checkpointing=true",
            f"chunk_tokens={chunk_tokens // 2}" if chunk_tokens > 1 else "",
            "teacher=sharded" if processes > 1 and settings.teacher == "replicated" else "",
        ]
        again = ", ".join(filter(None, may_change))
        advice = f"start the run again, it goes on from its last checkpoint, with {again}; or name" if again else "name"
        several = "" if processes > 1 else ", or several processes with --launch zero3 and teacher=sharded"
        said = str(error).strip().splitlines()
        raise UserError(
            f"out of memory ({said[0] if said else 'MemoryError'}); {advice} another output with "
            f"data.max_tokens={settings.data.max_tokens // 2}{several}"
        ) from error
