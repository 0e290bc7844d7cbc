"""report.md: the report for a person, tables first."""

from collections.abc import Sequence
from typing import Any

from eval.report import Report


def to_markdown(report: Report) -> str:
    """The whole report as Markdown; plots lie beside it in plots/."""
    lossless = report.verdict.lossless
    sections = [
        f"# Draft report: {report.settings['draft']} for {report.settings['target']}",
        f"**{report.verdict.line}**",
        _speed(report) if lossless else "",
        _training(report),
        _categories(report),
        _positions(report),
        _costs(report),
        _predicted(report) if lossless else "",
        _certificate(report),
        _settings(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers with two decimals, None as a dash."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _speed(report: Report) -> str:
    verdict, speeds = report.verdict, report.latency.tokens_per_s
    rows = [
        ["plain (our loop, γ = 0)", speeds["plain"], 1.0, 1.0],
        ["HF generate", speeds["hf_generate"], _over(verdict.speedup_decode, verdict.speedup_decode_over_hf_generate),
         _over(verdict.speedup_e2e, verdict.speedup_e2e_over_hf_generate)],
        [f"speculative, γ = {report.settings['num_draft_tokens']}", speeds["speculative"], verdict.speedup_decode,
         verdict.speedup_e2e],
    ]  # fmt: skip
    return (
        "## Speed\n\n"
        + table(["arm", "tokens/s, decode", "S_decode", "S_e2e"], rows)
        + (
            "\n\nS is Σ plain time ÷ Σ arm time over the same prompts (per token where lengths differ); the interval "
            "is a paired bootstrap over prompts. The plain loop runs in the same process, interleaved, at the thread "
            "count that makes plain decoding fastest."
        )
    )


def _over(ours: float | None, over_hf: float | None) -> float | None:
    return ours / over_hf if ours is not None and over_hf else None


def _training(report: Report) -> str:
    if not report.training:
        return ""
    t = report.training
    rows = [
        ["untrained", 0, t["alpha_before"], t["tau_before"]],
        ["trained", t["supervised_tokens_seen"], t["alpha_after"], t["tau_after"]],
    ]
    return (
        "## Training\n\n"
        + table(["draft", "supervised tokens seen", "α", "τ"], rows)
        + (
            f"\n\nReplayed on held-out answers of the target sampled at temperature {t['temperature']:g}"
            f"{' and greedily' if t.get('greedy_too') else ''}, γ = {t['num_draft_tokens']}."
        )
    )


def _categories(report: Report) -> str:
    rows = [
        [
            name,
            c.prompts,
            c.tokens,
            c.tau,
            c.alpha,
            c.accepted_share,
            c.speedup_decode,
            f"[{c.speedup_decode_ci[0]:.2f}, {c.speedup_decode_ci[1]:.2f}]" if c.speedup_decode_ci else None,
            f"{c.repeated_text_share:.0%}",
            c.speedup_decode_without_repeats,
        ]
        for name, c in report.categories.items()
    ]
    head = ["category", "prompts", "tokens", "τ", "α", "d", "S_decode", "interval", "repeated text", "S without it"]
    return "## By category\n\n" + table(head, rows)


def _positions(report: Report) -> str:
    p = report.positions
    rows = [
        [j + 1, p.conditional[j], p.joint[j], p.replayed_conditional[j], p.replayed_joint[j]]
        for j in range(len(p.conditional))
    ]
    a = report.acceptance
    return (
        "## Acceptance\n\n"
        + table(["position j", "a_j decoded", "A_j decoded", "a_j replayed", "A_j replayed"], rows)
        + "\n\n![acceptance by position](plots/positions.png)\n\n"
        + table(
            ["α", "τ (micro)", "τ (macro)", "τ replayed", "d = accepted ÷ drafted"],
            [[a["alpha"], a["tau"], a["tau_macro"], a["tau_replayed"], a["accepted_share"]]],
        )
        + "\n\nα = Σ min(p, q), teacher-forced on the plain answers. τ counts tokens per target pass, the target's own "
        "token in, the prefill token out."
    )


def _costs(report: Report) -> str:
    costs = report.latency
    widths = sorted(costs.verify_by_width)
    return (
        "## Costs\n\n"
        + table(["plain step", "c", "v", "o", "loop efficiency"],
                [[f"{1000 * costs.plain_step_s:.1f} ms", costs.c, costs.v, f"{costs.o:.3f}", costs.loop_efficiency]])
        + "\n\n![time of a round](plots/round.png)\n\nVerifying n tokens, in plain steps:\n\n"
        + table(["n", *map(str, widths)], [["v(n)", *(costs.verify_by_width[n] for n in widths)]])
    )  # fmt: skip


def _predicted(report: Report) -> str:
    rows = [[int(p["num_draft_tokens"]), p["tau"], p["speedup"]] for p in report.predicted]
    measured, predicted = report.verdict.speedup_decode, report.predicted_speedup
    said = f"predicted {predicted:.2f}×" if predicted is not None else "no prediction (γ changes from round to round)"
    against = f", measured {measured:.2f}×" if measured is not None else ""
    return (
        "## Predicted\n\n"
        + table(["γ", "τ replayed", "S predicted"], rows)
        + f"\n\nAt γ = {report.settings['num_draft_tokens']}: {said}{against}. "
        f"Best predicted γ: {report.recommended_num_draft_tokens}."
    )


def _certificate(report: Report) -> str:
    c = report.certificate
    rows = [
        [f"float32 greedy equals plain, {c.fp32_prompts} prompts, {c.fp32_tokens} tokens",
         f"{c.fp32_equal_prompts} equal, {c.fp32_near_ties} near-ties (gap < {c.near_tie_bound:g})",
         not c.fp32_failures],
        [f"run dtype: {c.run_dtype_tokens} emitted tokens against one plain forward",
         f"{c.run_dtype_not_best} not the best, largest gap {c.run_dtype_largest_gap:.3f}", not c.run_dtype_failures],
        ["tokens after a stop", c.tokens_after_stop, c.tokens_after_stop == 0],
    ]  # fmt: skip
    failures = "".join(f"\n- {failure}" for failure in [*c.fp32_failures, *c.run_dtype_failures])
    verdict = "passed" if c.passed else "FAILED"
    body = table(["check", "found", "passes"], [[*row[:2], "yes" if row[2] else "NO"] for row in rows])
    different, prompts = len(report.divergences), sum(category.prompts for category in report.categories.values())
    ties = sum(divergence.numeric_tie for divergence in report.divergences)
    bound = max((divergence.bound for divergence in report.divergences), default=0.0)
    return (
        f"## Losslessness certificate: {verdict}\n\n{body}\n\nProves: {c.proves}.{failures}\n\n"
        f"Answers that differ from the plain run in the run dtype: {different} of {prompts}"
        + (f", {ties} of them at a numeric tie (scores within {bound:.3f})." if different else ".")
    )


def _settings(report: Report) -> str:
    rows = [[key, value] for key, value in report.settings.items()]
    made = report.provenance
    rows += [
        ["git", made["git"]],
        ["device", f"{made['device']}, {made['processor']}, {made['cores']} cores"],
    ]
    rows += [["versions", ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)]]
    return (
        f"## Settings and provenance\n\n{table(['what', 'value'], rows)}\n\n"
        f"Share of text inside repeated 8-grams: {report.repeated_text_share:.0%}; S_decode without it: "
        f"{_cell(report.verdict.speedup_decode_without_repeats)}."
    )
