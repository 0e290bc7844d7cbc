"""Cells and tables of report.md."""

from collections.abc import Sequence
from typing import Any

from eval.report import SweepPoint
from eval.stats import Interval


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers with two decimals, None as a dash."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines)


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def with_interval(value: float | None, interval: Interval | None) -> str:
    shown = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return cell(value) + shown


def speedup_cell(point: SweepPoint | None) -> str | None:
    """S with its interval; None where it was not measured."""
    return with_interval(point.speedup_decode, point.speedup_decode_ci) if point else None
