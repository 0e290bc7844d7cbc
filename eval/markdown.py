"""report.md: the report for a person, tables first."""

from typing import Any

from eval import markdown_further as further
from eval.markdown_table import cell, speedup_cell, table, with_interval
from eval.report import Report
from eval.sampled_check import SURE, SampledCheck


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
        further.temperatures(report),
        further.batches(report),
        further.contexts(report),
        further.prefix(report),
        further.lookups(report),
        _footprint(report),
        _certificate(report),
        _settings(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


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
    p, a = report.positions, report.acceptance
    rows = [
        [j + 1, *(with_interval(*pair) for pair in (
            (p.conditional[j], p.conditional_ci[j]), (p.joint[j], p.joint_ci[j]),
            (p.replayed_conditional[j], p.replayed_conditional_ci[j]), (p.replayed_joint[j], p.replayed_joint_ci[j]),
        ))]
        for j in range(len(p.conditional))
    ]  # fmt: skip
    cells = [
        with_interval(a.alpha, a.alpha_ci), with_interval(a.tau, a.tau_ci), a.tau_macro,
        with_interval(a.tau_replayed, a.tau_replayed_ci), a.accepted_share,
    ]  # fmt: skip
    return (
        "## Acceptance\n\n"
        + table(["position j", "a_j decoded", "A_j decoded", "a_j replayed", "A_j replayed"], rows)
        + "\n\n![acceptance by position](plots/positions.png)\n\n"
        + table(["α", "τ (micro)", "τ (macro)", "τ replayed", "d = accepted ÷ drafted"], [cells])
        + "\n\nα = Σ min(p, q), teacher-forced on the plain answers. τ counts tokens per target pass, the target's own "
        "token in, the prefill token out. In other tools' words:\n\n"
        + table(["figure", "value"], [list(figure) for figure in report.other_tools.items()])
    )


def _costs(report: Report) -> str:
    costs = report.latency
    widths = sorted(costs.verify_by_width)
    return (
        "## Costs\n\n"
        + table(["plain step", "c", "v", "o", "loop efficiency"],
                [[f"{1000 * costs.plain_step_s:.1f} ms", costs.c, costs.v, f"{costs.o:.3f}", costs.loop_efficiency]])
        + _spread(costs.repeat_spread)
        + "\n\n![time of a round](plots/round.png)\n\nVerifying n tokens, in plain steps:\n\n"
        + table(["n", *map(str, widths)], [["v(n)", *(costs.verify_by_width[n] for n in widths)]])
    )  # fmt: skip


def _spread(spread: float | None) -> str:
    return f"\n\nRepeats of one arm on one prompt differ by up to {spread:.0%}." if spread is not None else ""


def _predicted(report: Report) -> str:
    measured = {point.num_draft_tokens: point for point in report.lengths}
    rows = [
        [p.num_draft_tokens, p.tau, with_interval(p.speedup, p.speedup_ci), p.break_even,
         speedup_cell(measured.get(p.num_draft_tokens))]
        for p in report.predicted
    ]  # fmt: skip
    profiled = "another process" if report.settings["latency_profile"] else "this process"
    best = report.oracle
    return (
        "## Predicted\n\n"
        + table(["γ", "τ replayed", "S predicted", "α to break even", "S measured (sweep)"], rows)
        + "\n\n![speed-up by draft length](plots/lengths.png)"
        + f"\n\nFrom replay on the plain answers and a latency profile of {profiled}. Best predicted γ: "
        + f"{report.recommended_num_draft_tokens}. {_gap(report)}"
        + (f" A draft that costs nothing and is always right: {best.speedup:.2f}× at γ = {best.num_draft_tokens}."
           if best else "")
    )  # fmt: skip


def _gap(report: Report) -> str:
    gap = report.gap
    if gap is None:
        return "No prediction for this run (γ changes from round to round)."
    factors = {name: getattr(gap, name) for name in ("acceptance", "truncation", "draft", "verify", "overhead", "rest")}
    return (
        f"At γ = {report.settings['num_draft_tokens']}: predicted {gap.predicted:.2f}×, measured {gap.measured:.2f}×; "
        f"{gap.measured / gap.predicted:.3f} = " + " · ".join(f"{name} {x:.3f}" for name, x in factors.items()) + "."
    )


def _footprint(report: Report) -> str:
    f = report.footprint
    rows: list[list[Any]] = [
        ["weights, GiB", f"{f.target_gib:.3f}", f"{f.draft_gib:.3f}"],
        ["keys and values, KiB a token", f.target_kv_bytes_per_token / 1024, f.draft_kv_bytes_per_token / 1024],
    ]
    return (
        "## Memory and arithmetic\n\n"
        + table(["what", "target", "draft"], rows)
        + f"\n\nGFLOP for each emitted token: {f.plain_gflop_per_token:.3g} plain, "
        f"{f.speculative_gflop_per_token:.3g} with the draft."
    )


def _certificate(report: Report) -> str:
    c = report.certificate
    rows = [
        [f"float32 greedy equals plain, {c.fp32_prompts} prompts, {c.fp32_tokens} tokens",
         f"{c.fp32_equal_prompts} equal, {c.fp32_near_ties} near-ties (gap < {c.near_tie_bound:g})",
         not c.fp32_failures],
        ["tokens after a stop", c.tokens_after_stop, c.tokens_after_stop == 0],
    ]  # fmt: skip
    if c.sampled:
        rows += _sampled_rows(c.sampled)
    else:
        found = f"{c.run_dtype_not_best} not the best, largest gap {c.run_dtype_largest_gap:.3f}"
        checked = f"run dtype: {c.run_dtype_tokens} emitted tokens against one plain forward"
        rows += [[checked, found, not c.run_dtype_failures]]
    sampled_failures = c.sampled.failures if c.sampled else []
    failures = "".join(f"\n- {failure}" for failure in [*c.fp32_failures, *c.run_dtype_failures, *sampled_failures])
    verdict = "passed" if c.passed else "FAILED"
    body = table(["check", "found", "passes"], [[*row[:2], "yes" if row[2] else "NO"] for row in rows])
    told = f"## Losslessness certificate: {verdict}\n\n{body}\n\nProves: {c.proves}.{failures}"
    return told if c.sampled else f"{told}\n\n{_divergences(report)}"


def _divergences(report: Report) -> str:
    different, ties = len(report.divergences), sum(divergence.numeric_tie for divergence in report.divergences)
    told = f"Answers that differ from the plain run in the run dtype: {different} of {len(report.prompts)}"
    if not different:
        return f"{told}."
    bound = max(divergence.bound for divergence in report.divergences)
    rows = [
        [d.id, d.differs_from_plain_at, None if d.gap is None else f"{d.gap:.4f}", "yes" if d.numeric_tie else "no"]
        for d in report.divergences
    ]
    head = ["prompt", "first other token", "gap of the scores", "numeric tie"]
    return f"{told}, {ties} of them at a numeric tie (scores within {bound:.3f}).\n\n{table(head, rows)}"


def _sampled_rows(sampled: SampledCheck) -> list[list[Any]]:
    equal = not any("same noise" in failure for failure in sampled.failures)
    rows = [
        [f"sampled equals plain under shared noise, {sampled.seed_exact_prompts} prompts, {sampled.seed_exact_tokens} "
         "tokens", f"{sampled.seed_exact_near_ties} near-ties", equal]
    ]  # fmt: skip
    if sampled.law_p_value is not None and sampled.control_p_value is not None:
        power = "" if sampled.control_failed else ", so this check cannot tell here"
        rows += [
            [f"law of {sampled.law_samples} short answers, chi-square",
             f"p = {sampled.law_p_value:.3f}; accepting everything gives p = {sampled.control_p_value:.1e}{power}",
             sampled.law_p_value >= SURE]
        ]  # fmt: skip
    return rows


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
        f"{cell(report.verdict.speedup_decode_without_repeats)}. {_overlap(report)}"
    )


def _overlap(report: Report) -> str:
    overlap = report.training_overlap
    if overlap is None:
        return "Overlap of the suite with the training data: not measured (no training data at hand)."
    return (
        f"Prompts of the suite with {overlap.words} words in a row that stand in one of {overlap.training_rows} "
        f"training rows: {len(overlap.prompts)}{': ' + ', '.join(overlap.prompts) if overlap.prompts else ''}."
    )
