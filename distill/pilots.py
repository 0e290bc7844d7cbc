"""Short training runs of a few shapes of draft, and what they promise for a whole budget."""

from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError
from configs.files import read_json
from configs.records import whole_records
from distill.answers import DataSettings
from distill.claims import provenance_path
from distill.job import run
from distill.job_settings import JobSettings
from distill.plan import Acceptance, extrapolate
from distill.shape import DraftSettings

MEASUREMENTS = 6  # of a pilot: the points of its line


def law_of(answers: Path) -> dict[str, float]:
    """The law that answers were sampled with, as their provenance file says it; T = 1 where there is none."""
    beside = provenance_path(answers)
    said = read_json(beside)["settings"] if beside.is_file() else {}
    return {name: said[name] for name in ("temperature", "top_k", "top_p") if name in said}


def pilot(
    target: str, data: DataSettings, shape: DraftSettings, tokens: int, tokens_per_row: float, rows: int, folder: Path,
    teacher_dtype: str,
) -> list[dict[str, float]]:  # fmt: skip
    """Train on `tokens` supervised tokens of the answers of `data`; what was measured after how many, in order.

    A finished pilot is read back. Raises UserError for a budget too small for `MEASUREMENTS` steps.
    """
    batch_rows = 8
    steps = int(tokens / (batch_rows * tokens_per_row))
    if steps < MEASUREMENTS:
        least = int(MEASUREMENTS * batch_rows * tokens_per_row) + 1
        raise UserError(f"a pilot of {tokens} tokens is too short: expected {least} or more; raise --budget-tokens")
    settings = JobSettings.model_validate(
        {
            "target": target, "output": folder, "teacher_dtype": teacher_dtype, "draft": shape.model_dump(),
            "data": data.model_copy(update={"held_out_rows": max(1, min(32, rows // 5))}),
            "objective": {"name": "hybrid"},
            "train": {
                "steps": steps, "batch_rows": batch_rows, "micro_rows": batch_rows,
                "measure_every": steps // MEASUREMENTS, "save_every": steps,
                "optim": {"learning_rate": 1e-3, "warmup_steps": max(1, steps // 10), "clip_norm": 0.5},
            },
        }
    )  # fmt: skip
    run(settings)
    return learning_curve(folder / "metrics.jsonl")


def learning_curve(metrics: Path) -> list[dict[str, float]]:
    """Held-out α by position after how many supervised tokens, from a run's metrics; untrained is left out."""
    seen: dict[int, float] = {}
    curve: dict[int, dict[str, float]] = {}
    for line in whole_records(metrics):
        seen |= {line["step"]: line["tokens"]} if "tokens" in line else {}
        held_out = {name.removeprefix("held_out/"): line[name] for name in line if name.startswith("held_out/")}
        if held_out and line["step"] in seen:
            curve[line["step"]] = held_out | {"tokens": seen[line["step"]]}
    return [curve[step] for step in sorted(curve)]


def promised(curve: Sequence[dict[str, float]], tokens: int, ceiling: float) -> Acceptance:
    """α after `tokens`, and the later positions' share of it as it was at the pilot's end."""
    last = curve[-1]
    first = extrapolate([(point["tokens"], point["alpha"]) for point in curve], tokens, ceiling)
    later = [last[name] / last["alpha"] for name in sorted(last) if name.startswith("alpha_") and last["alpha"]]
    return Acceptance(first=first, later=later)
