"""The runs of a measurement that is under way, prompt by prompt, so that a crash loses none of them."""

from collections.abc import Iterable
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
    arms = {name: asdict(getattr(run, name)) for name in ("plain", "speculative", "hf", "trace")}
    append_record(path, {"id": run.prompt.id, "prompt_ids": run.prompt_ids} | arms)


def read_runs(path: Path, prompts: Iterable[Prompt]) -> dict[str, PromptRun]:
    """The runs in the file, by the id of their prompt."""
    known = {prompt.id: prompt for prompt in prompts}
    return {row["id"]: _run(row, known[row["id"]]) for row in whole_records(path)}


def _run(row: dict[str, Any], prompt: Prompt) -> PromptRun:
    trace = row["trace"]
    rounds = [Round(**{name: _fixed(value) for name, value in done.items()}) for done in trace["rounds"]]
    plain, speculative, hf = (Arm(**row[name]) for name in ("plain", "speculative", "hf"))
    return PromptRun(prompt, row["prompt_ids"], plain, speculative, hf, Generation(**trace | {"rounds": rounds}))


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
