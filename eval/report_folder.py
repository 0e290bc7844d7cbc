"""The folder that a report lies in, and the draft folder that takes it along."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import UserError
from configs.files import read_json, without_local_paths, write_json, write_text
from configs.reader import differing_keys
from configs.records import write_parquet
from eval.live import PromptRun
from eval.markdown import to_markdown
from eval.page import to_html
from eval.plots import plot_lengths, plot_positions, plot_round
from eval.report import Report


def read_back(path: Path, described: dict[str, Any], threads: int) -> Report | None:
    """The report that lies there already, if it is of the measurement `described`, at any thread count for 0.

    Raises UserError when it is of another one.
    """
    if not path.is_file():
        return None
    try:
        report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError:
        raise UserError(f"{path}: not a report of this version; name another --out or remove it") from None
    # An older version knew nothing of these.
    measured_with = {
        "lookup_prompts": described["lookup_prompts"],
        "sweep_batches": [],
        "sweep_contexts": [],
        "quantize_target": None,
        "quantize_draft": None,
    } | report.settings
    measured_with |= {} if threads else {"threads": None}
    different = differing_keys(measured_with, described | {"threads": threads or None})
    if different:
        raise UserError(
            f"{path.parent}: holds another measurement (different: {', '.join(different)}); name another --out"
        )
    return report


def write_report(report: Report, runs: Sequence[PromptRun], out: Path) -> None:
    """Rounds, plots and pages first, report.json last: a folder with a report.json is whole."""
    rounds = [
        {"id": run.prompt.id, "round": number} | vars(done)
        for run in runs
        for number, done in enumerate(run.trace.rounds)
    ]
    write_parquet(out / "rounds.parquet", rounds)
    plot_positions(report, out / "plots" / "positions.png")
    plot_round(report, out / "plots" / "round.png")
    if report.predicted:
        plot_lengths(report, out / "plots" / "lengths.png")
    write_text(out / "report.md", to_markdown(report))
    write_text(out / "report.html", to_html(report, out))
    write_json(out / "report.json", report.model_dump(mode="json"))


def hand_to_draft(report: Report, draft: Path) -> None:
    """A draft folder made here takes its report along, without this machine's paths, and the recommended γ."""
    config_path = draft / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    if "draftsmith" in config:
        config["draftsmith"]["recommended_num_draft_tokens"] = report.recommended_num_draft_tokens
        write_json(draft / "report.json", without_local_paths(report.model_dump(mode="json")))
        write_json(config_path, config)
