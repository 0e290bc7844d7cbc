"""How a report is put together from the runs of a measurement."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.drafts.contract import Draft
from decode.length import Costs
from decode.models import Loaded
from decode.trace import AtPosition, Round, Tally, at_positions
from decode.trace import positions as live_positions
from eval.certificate import Certificate, Divergence
from eval.converters import in_other_words
from eval.figures import PromptFigures, alpha_parts, tau_parts
from eval.footprint import footprint
from eval.gap import Gap, explain
from eval.latency import Latency
from eval.live import PromptRun
from eval.predict import best_length, oracle, predict
from eval.replay import Replay, alpha, tau_of
from eval.replay import at_positions as replayed_at_positions
from eval.replay import positions as replayed_positions
from eval.replay import tau_parts as replayed_tau_parts
from eval.report import (
    Acceptance,
    BatchPoint,
    Category,
    ContextPoint,
    MeasuredCosts,
    Overlap,
    Positions,
    PrefixReuse,
    Report,
    SweepPoint,
    Verdict,
)  # fmt: skip
from eval.samples import samples
from eval.stats import Interval, Timed, ratio_interval, speedup, speedup_interval
from eval.text import repeated_places, repeated_share


@dataclass(frozen=True)
class Measured:
    """What a measurement found, before it is a report. `texts` are the replays of the plain answers of `runs`.

    `latency` is this run's own; `costs` are what predictions go by, another process' where one was given.
    """

    runs: Sequence[PromptRun]
    texts: Sequence[Replay]
    latency: Latency
    costs: Costs
    certificate: Certificate
    divergences: Sequence[Divergence]
    lengths: Sequence[SweepPoint] = ()
    temperatures: Sequence[SweepPoint] = ()
    lookups: Sequence[SweepPoint] = ()
    batches: Sequence[BatchPoint] = ()
    contexts: Sequence[ContextPoint] = ()
    prefix: PrefixReuse | None = None


def assemble(
    target: Loaded, draft: Draft[Any], found: Measured, settings: dict[str, Any], training: dict[str, Any] | None,
    overlap: Overlap | None, provenance: dict[str, Any],
) -> Report:  # fmt: skip
    """Put the parts together.

    With draft lengths picked by auto there is no one γ to replay or predict: those figures are absent.
    """
    runs, texts, lossless = found.runs, found.texts, found.certificate.passed
    rounds = [r for run in runs for r in run.trace.rounds]
    verifier, is_auto = settings["verifier"], settings["num_draft_tokens"] == "auto"
    gamma = max(len(r.drafted) for r in rounds) if is_auto else settings["num_draft_tokens"]
    predictions = predict(texts, found.costs, verifier)
    predicted = next(p.speedup for p in predictions if p.num_draft_tokens == max(gamma, 1))
    verdict = _verdict(runs, texts, lossless)
    figures = [PromptFigures.of(run, text) for run, text in zip(runs, texts, strict=True)]
    said = lossless and not is_auto
    return Report(
        verdict=verdict,
        settings=settings,
        latency=_costs(runs, rounds, found.latency, settings["threads"]),
        positions=_positions(runs, texts, gamma, verifier),
        acceptance=_acceptance(runs, figures, texts, None if is_auto else gamma, verifier),
        other_tools=in_other_words(runs, lossless),
        predicted_speedup=predicted if said else None,
        predicted=predictions if lossless else [],
        recommended_num_draft_tokens=best_length(predictions),
        gap=_gap(found, predicted, verdict.speedup_decode, gamma, verifier) if said else None,
        oracle=oracle(texts, found.costs) if lossless else None,
        categories=_categories(runs, texts, lossless),
        lengths=list(found.lengths) if lossless else [],
        temperatures=list(found.temperatures) if lossless else [],
        lookups=list(found.lookups) if lossless else [],
        batches=list(found.batches) if lossless else [],
        contexts=list(found.contexts) if lossless else [],
        prompt_cache=found.prefix,
        footprint=footprint(target.model, draft.model, Tally.of(rounds), rereads=bool(draft.taps)),
        repeated_text_share=repeated_share([run.trace.token_ids for run in runs]),
        training_overlap=overlap,
        training=training,
        certificate=found.certificate,
        divergences=list(found.divergences),
        samples=samples(runs, target.tokenizer),
        prompts=figures,
        provenance=provenance,
    )


def _verdict(runs: Sequence[PromptRun], texts: Sequence[Replay], lossless: bool) -> Verdict:
    tau, alpha_ = Tally.of([r for run in runs for r in run.trace.rounds]).tau or 1.0, alpha(texts)
    if not lossless:
        return Verdict(
            line="NOT LOSSLESS: the certificate failed, no speed-up is claimed", tau=tau, alpha=alpha_, lossless=False,
            speedup_decode=None, speedup_decode_ci=None, speedup_decode_without_repeats=None, speedup_e2e=None,
            speedup_e2e_ci=None,
            speedup_decode_over_hf_generate=None, speedup_e2e_over_hf_generate=None,
        )  # fmt: skip
    plain, ours, hf = ([getattr(run, arm) for run in runs] for arm in ("plain", "speculative", "hf"))
    decode = [[arm.decode for arm in arms] for arms in (plain, ours, hf)]
    e2e = [[arm.end_to_end for arm in arms] for arms in (plain, ours, hf)]
    s, s_e2e = speedup(decode[0], decode[1]), speedup(e2e[0], e2e[1])
    interval = speedup_interval(decode[0], decode[1])
    speeds = f"S_decode {s:.2f}×{_shown(interval)}, S_e2e {s_e2e:.2f}×, " if s is not None and s_e2e is not None else ""
    return Verdict(
        line=f"{speeds}τ {tau:.2f}, α {alpha_:.2f}, lossless: pass — {_says(interval)}",
        speedup_decode=s, speedup_decode_ci=interval, speedup_decode_without_repeats=_without_repeats(runs),
        speedup_e2e=s_e2e, speedup_e2e_ci=speedup_interval(e2e[0], e2e[1]),
        speedup_decode_over_hf_generate=speedup(decode[2], decode[1]),
        speedup_e2e_over_hf_generate=speedup(e2e[2], e2e[1]),
        tau=tau, alpha=alpha_, lossless=True,
    )  # fmt: skip


def _acceptance(
    runs: Sequence[PromptRun], figures: Sequence[PromptFigures], texts: Sequence[Replay], gamma: int | None,
    verifier: str,
) -> Acceptance:  # fmt: skip
    """Without one γ (auto) there is no replayed τ."""
    tally = Tally.of([r for run in runs for r in run.trace.rounds])
    taus = [value for run in runs if (value := run.trace.tally.tau) is not None]
    replayed = replayed_tau_parts(texts, gamma, verifier) if gamma else []
    return Acceptance(
        alpha=alpha(texts),
        alpha_ci=ratio_interval(alpha_parts(figures)),
        tau=tally.tau,
        tau_ci=ratio_interval(tau_parts(figures)),
        tau_macro=sum(taus) / len(taus) if taus else None,
        tau_replayed=tau_of(replayed) if gamma else None,
        tau_replayed_ci=ratio_interval(replayed),
        accepted_share=tally.accepted_share,
        drafted_per_round=tally.drafted / tally.rounds,
    )


def _positions(runs: Sequence[PromptRun], texts: Sequence[Replay], gamma: int, verifier: str) -> Positions:
    conditional, joint = live_positions([r for run in runs for r in run.trace.rounds])
    live = [at_positions(run.trace.rounds) for run in runs]
    replayed = [replayed_at_positions(text, gamma, verifier) for text in texts]
    replayed_conditional, replayed_joint = replayed_positions(texts, gamma, verifier)
    return Positions(
        conditional=conditional, conditional_ci=_intervals(live, "reached", len(conditional)),
        joint=joint, joint_ci=_intervals(live, "offered", len(joint)),
        replayed_conditional=replayed_conditional, replayed_conditional_ci=_intervals(replayed, "reached", gamma),
        replayed_joint=replayed_joint, replayed_joint_ci=_intervals(replayed, "offered", gamma),
    )  # fmt: skip


def _intervals(counts: Sequence[Sequence[AtPosition]], out_of: str, longest: int) -> list[Interval | None]:
    """At each position the interval of accepted ÷ `out_of`, over prompts; few prompts may have got that far."""
    return [
        ratio_interval([(at[j].accepted, getattr(at[j], out_of)) for at in counts if j < len(at)])
        for j in range(longest)
    ]


def _gap(found: Measured, predicted: float, measured: float | None, gamma: int, verifier: str) -> Gap | None:
    if measured is None:
        return None
    plain = [run.plain.decode for run in found.runs]
    step = sum(timed.seconds for timed in plain) / sum(timed.tokens for timed in plain)
    rounds = [r for run in found.runs for r in run.trace.rounds]
    return explain(predicted, measured, rounds, found.texts, gamma, verifier, found.costs, step)


def _without_repeats(runs: Sequence[PromptRun]) -> float | None:
    """S_decode over the tokens outside repeated 8-grams; a round's time is shared out over its tokens."""
    plain, ours = [], []
    for run in runs:
        repeated = repeated_places(run.plain.token_ids)
        fresh = sum(place not in repeated for place in range(1, len(run.plain.token_ids)))
        plain.append(Timed(run.plain.decode_s * fresh / max(1, run.plain.decode.tokens), fresh))
        repeated, at, seconds, tokens = repeated_places(run.trace.token_ids), 1, 0.0, 0
        for done in run.trace.rounds:
            fresh = sum(place not in repeated for place in range(at, at + len(done.tokens)))
            seconds, tokens = seconds + done.round_s * fresh / len(done.tokens), tokens + fresh
            at += len(done.tokens)
        ours.append(Timed(seconds, tokens))
    return speedup(plain, ours)


def _shown(interval: Interval | None) -> str:
    return f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def _says(interval: Interval | None) -> str:
    if interval is None:
        return "too few prompts to tell whether it pays"
    low, high = interval
    return "this draft pays" if low > 1 else "this draft does not pay" if high < 1 else "too close to 1 to tell"


def _costs(runs: Sequence[PromptRun], rounds: Sequence[Round], latency: Latency, threads: int) -> MeasuredCosts:
    whole = sum(r.round_s for r in rounds) or float("nan")
    draft, verify = sum(r.draft_s for r in rounds), sum(r.verify_s for r in rounds)
    forwards = verify + sum(r.draft_forward_s for r in rounds)
    arms = {"plain": "plain", "speculative": "speculative", "hf_generate": "hf"}
    paces = {name: [getattr(run, arm).decode for run in runs] for name, arm in arms.items()}
    return MeasuredCosts(
        **vars(latency),
        loop_efficiency=forwards / whole,
        round_ms={
            name: 1000 * seconds / len(rounds)
            for name, seconds in (("draft", draft), ("verify", verify), ("other", whole - draft - verify))
        },
        tokens_per_s={
            name: sum(timed.tokens for timed in pace) / sum(timed.seconds for timed in pace)
            for name, pace in paces.items()
        },
        threads=threads,
        repeat_spread=max(
            (arm.spread for run in runs for arm in (run.plain, run.speculative, run.hf) if arm.spread is not None),
            default=None,
        ),
    )


def _categories(runs: Sequence[PromptRun], texts: Sequence[Replay], lossless: bool) -> dict[str, Category]:
    members: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        members[run.prompt.category].append(i)
    found = {}
    for name, chosen in members.items():
        some = [runs[i] for i in chosen]
        tally = Tally.of([r for run in some for r in run.trace.rounds])
        answers = [run.trace.token_ids for run in some]
        plain, ours = [r.plain.decode for r in some], [r.speculative.decode for r in some]
        says = lossless and tally.rounds > 0
        found[name] = Category(
            prompts=len(some),
            tokens=sum(map(len, answers)),
            tau=tally.tau or 1.0,
            alpha=alpha([texts[i] for i in chosen]),
            accepted_share=tally.accepted_share,
            speedup_decode=speedup(plain, ours) if says else None,
            speedup_decode_ci=speedup_interval(plain, ours) if says else None,
            speedup_decode_without_repeats=_without_repeats(some) if says else None,
            repeated_text_share=repeated_share(answers),
        )
    return found
