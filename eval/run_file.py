"""The runs of a measurement that is under way, prompt by prompt, so that a crash loses none of them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.records import append_record, whole_records
from decode.generation import Generation
from decode.trace import Round
from eval.live import Arm, PromptRun
from eval.suites import Prompt


def append_run(path: Path, run: PromptRun) -> None:
    """Add a finished run to the file."""
    append_record(path, asdict(run))


def read_runs(path: Path) -> dict[str, PromptRun]:
    """The runs in the file, by the id of their prompt."""
    return {row["prompt"]["id"]: _run(row) for row in whole_records(path)}


def _run(row: dict[str, Any]) -> PromptRun:
    trace = row["trace"]
    return PromptRun(
        prompt=_made(Prompt, row["prompt"]),
        prompt_ids=row["prompt_ids"],
        trace=Generation(**trace | {"rounds": [_made(Round, done) for done in trace["rounds"]]}),
        **{name: Arm(**row[name]) for name in ("plain", "speculative", "hf")},
    )


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """JSON has lists where these have tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
