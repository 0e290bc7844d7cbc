"""The plots of a report."""

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
    """Where the time of a round goes, beside plain decoding of as many tokens and a round that costs one plain step."""
    costs, tau = report.latency, report.verdict.tau
    figure, axes = plt.subplots(figsize=(7, 2.6))
    left = 0.0
    for (name, value), colour in zip(costs.round_ms.items(), (ORANGE, BLUE, GREY), strict=True):
        axes.barh("speculative round", value, left=left, color=colour, label=f"{name} {value:.1f} ms")
        left += value
    plain_ms = 1000 * tau / costs.tokens_per_s["plain"]
    axes.barh("plain, same tokens", plain_ms, color="#4a5568", label=f"plain {plain_ms:.1f} ms")
    ideal_ms = plain_ms / tau
    axes.barh("ideal round", ideal_ms, color="#38a169", label=f"one plain step {ideal_ms:.1f} ms")
    axes.set(xlabel=f"ms for τ = {tau:.2f} tokens")
    axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    _save(figure, path)


def plot_lengths(report: Report, path: Path) -> None:
    """S by draft length: as predicted, with its interval over the texts, and as measured."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    places = [p.num_draft_tokens for p in report.predicted]
    axes.plot(places, [p.speedup for p in report.predicted], "x--", color=BLUE, label="predicted")
    if all(p.speedup_ci for p in report.predicted):
        low, high = zip(*(p.speedup_ci for p in report.predicted if p.speedup_ci), strict=True)
        axes.fill_between(places, low, high, color=BLUE, alpha=0.15, linewidth=0)
    gamma, verdict = report.settings["num_draft_tokens"], report.verdict
    measured = [(gamma, verdict.speedup_decode, verdict.speedup_decode_ci)]
    measured += [(p.num_draft_tokens, p.speedup_decode, p.speedup_decode_ci) for p in report.lengths]
    for place, speed, interval in measured:
        if speed is not None and place in places:
            ends = [[speed - interval[0]], [interval[1] - speed]] if interval else None
            axes.errorbar([place], [speed], yerr=ends, fmt="o", color=ORANGE, capsize=3)
    axes.plot([], [], "o", color=ORANGE, label="measured")
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set(xlabel="γ, tokens drafted in a round", ylabel="S_decode", xticks=places)
    axes.legend(frameon=False)
    axes.set_title("Speed-up by draft length")
    _save(figure, path)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
