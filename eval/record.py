"""The record of predictions: what was foreseen for each measurement, and what came."""

from pathlib import Path

from configs.records import append_record
from eval.report import Report

ABOUT = ("target", "draft", "num_draft_tokens", "temperature", "verifier", "run_dtype", "suite", "max_prompts")


def keep_record(path: Path, report: Report) -> None:
    """Add a line for a report with a prediction: predicted, measured and what they are of."""
    if report.predicted_speedup is None or report.verdict.speedup_decode is None:
        return
    about = {name: report.settings[name] for name in ABOUT}
    profiled = "another process" if report.settings["latency_profile"] else "the same process"
    said = {"predicted": report.predicted_speedup, "measured": report.verdict.speedup_decode, "profile_of": profiled}
    append_record(path, said | {"measured_ci": report.verdict.speedup_decode_ci} | about)
