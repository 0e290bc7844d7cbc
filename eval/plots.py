"""The two plots of a report."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from eval.report import Report

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#a0aec0"


def plot_positions(report: Report, path: Path) -> None:
    """Conditional and joint acceptance by drafted position, decoded and replayed."""
    p = report.positions
    places = range(1, len(p.conditional) + 1)
    figure, axes = plt.subplots(figsize=(6, 3.6))
    curves = [
        ("a_j decoded", [_or_nan(x) for x in p.conditional], BLUE, "o-"),
        ("a_j replayed", p.replayed_conditional, BLUE, "x--"),
        ("A_j decoded", [_or_nan(x) for x in p.joint], ORANGE, "o-"),
        ("A_j replayed", p.replayed_joint, ORANGE, "x--"),
    ]
    for label, values, colour, style in curves:
        axes.plot(places, values[: len(places)], style, color=colour, label=label)
    axes.set(xlabel="drafted position j", ylabel="acceptance", ylim=(0, 1), xticks=list(places))
    axes.legend(frameon=False)
    axes.set_title("Acceptance by position")
    _save(figure, path)


def plot_round(report: Report, path: Path) -> None:
    """Where the time of a round goes, beside what plain decoding takes for as many tokens."""
    costs, tau = report.latency, report.verdict.tau
    figure, axes = plt.subplots(figsize=(7, 2.2))
    left = 0.0
    for (name, value), colour in zip(costs.round_ms.items(), (ORANGE, BLUE, GREY), strict=True):
        axes.barh("speculative round", value, left=left, color=colour, label=f"{name} {value:.1f} ms")
        left += value
    plain_ms = 1000 * tau / costs.tokens_per_s["plain"]
    axes.barh("plain, same tokens", plain_ms, color="#4a5568", label=f"plain {plain_ms:.1f} ms")
    axes.set(xlabel=f"ms for τ = {tau:.2f} tokens")
    axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    _save(figure, path)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
