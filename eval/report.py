"""The typed result of a measurement (report.json), and how it is put together from the runs."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from decode.trace import Round, Tally
from decode.trace import positions as live_positions
from eval.certificate import Certificate, Divergence
from eval.latency import Latency
from eval.live import PromptRun
from eval.predict import Prediction, best_length
from eval.replay import Replay, alpha
from eval.replay import positions as replayed_positions
from eval.replay import tau as replayed_tau
from eval.stats import Timed, speedup, speedup_interval
from eval.text import repeated_places, repeated_share

SCHEMA = 1


class Verdict(BaseModel):
    """The headline. Without a passed certificate there is no speed-up, and `line` says so."""

    line: str
    speedup_decode: float | None
    speedup_decode_ci: tuple[float, float] | None
    speedup_decode_without_repeats: float | None
    speedup_e2e: float | None
    speedup_e2e_ci: tuple[float, float] | None
    speedup_decode_over_hf_generate: float | None
    speedup_e2e_over_hf_generate: float | None
    tau: float
    alpha: float
    lossless: bool


class Costs(BaseModel):
    """c, v, o in plain steps, from the latency profile; `verify_by_width` is v(n). Paces are of the measured run."""

    plain_step_s: float
    c: float
    v: float
    o: float
    verify_by_width: dict[int, float]
    loop_efficiency: float
    round_ms: dict[str, float]
    tokens_per_s: dict[str, float]
    threads: int


class Positions(BaseModel):
    """a_j and A_j for j = 1..γ: as decoded (None where no round reached j), and as replayed on plain target text."""

    conditional: list[float | None]
    joint: list[float | None]
    replayed_conditional: list[float]
    replayed_joint: list[float]


class Category(BaseModel):
    prompts: int
    tokens: int
    tau: float
    alpha: float
    accepted_share: float | None
    speedup_decode: float | None
    speedup_decode_ci: tuple[float, float] | None
    speedup_decode_without_repeats: float | None
    repeated_text_share: float


class Report(BaseModel):
    """Everything a measurement found. Schema version 1."""

    schema_version: int = SCHEMA
    verdict: Verdict
    settings: dict[str, Any]
    latency: Costs
    positions: Positions
    acceptance: dict[str, float | None]
    predicted_speedup: float | None
    predicted: list[dict[str, float]]
    recommended_num_draft_tokens: int
    categories: dict[str, Category]
    repeated_text_share: float
    training: dict[str, Any] | None
    certificate: Certificate
    divergences: list[Divergence]
    provenance: dict[str, Any]


def assemble(
    runs: Sequence[PromptRun], texts: Sequence[Replay], latency: Latency, predictions: Sequence[Prediction],
    certificate: Certificate, divergences: Sequence[Divergence], settings: dict[str, Any],
    training: dict[str, Any] | None, provenance: dict[str, Any],
) -> Report:  # fmt: skip
    """Put the parts together. `texts` are the replays of the plain answers of `runs`, in the same order.

    With draft lengths picked by auto there is no one γ to replay or predict: those figures are absent.
    """
    rounds = [r for run in runs for r in run.trace.rounds]
    verifier, is_auto = settings["verifier"], settings["num_draft_tokens"] == "auto"
    gamma = max(len(r.drafted) for r in rounds) if is_auto else settings["num_draft_tokens"]
    conditional, joint = live_positions(rounds)
    replayed_conditional, replayed_joint = replayed_positions(texts, gamma, verifier)
    predicted = next(p.speedup for p in predictions if p.num_draft_tokens == max(gamma, 1))
    tally = Tally.of(rounds)
    taus = [value for run in runs if (value := run.trace.tally.tau) is not None]
    return Report(
        verdict=_verdict(runs, tally.tau or 1.0, alpha(texts), certificate.passed),
        settings=settings,
        latency=_costs(runs, rounds, latency, settings["threads"]),
        positions=Positions(
            conditional=conditional, joint=joint,
            replayed_conditional=replayed_conditional, replayed_joint=replayed_joint,
        ),
        acceptance={
            "alpha": alpha(texts),
            "tau": tally.tau,
            "tau_macro": sum(taus) / len(taus) if taus else None,
            "tau_replayed": None if is_auto else replayed_tau(texts, gamma, verifier),
            "accepted_share": tally.accepted_share,
            "drafted_per_round": tally.drafted / tally.rounds,
        },
        predicted_speedup=predicted if certificate.passed and not is_auto else None,
        predicted=[vars(prediction) for prediction in predictions] if certificate.passed else [],
        recommended_num_draft_tokens=best_length(predictions),
        categories=_categories(runs, texts, certificate.passed),
        repeated_text_share=repeated_share([run.trace.token_ids for run in runs]),
        training=training,
        certificate=certificate,
        divergences=list(divergences),
        provenance=provenance,
    )  # fmt: skip


def _verdict(runs: Sequence[PromptRun], tau: float, alpha_: float, lossless: bool) -> Verdict:
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
    return Verdict(
        line=f"S_decode {s:.2f}×{_shown(interval)}, S_e2e {s_e2e:.2f}×, τ {tau:.2f}, α {alpha_:.2f}, "
        f"lossless: pass — {_says(interval)}",
        speedup_decode=s, speedup_decode_ci=interval, speedup_decode_without_repeats=_without_repeats(runs),
        speedup_e2e=s_e2e, speedup_e2e_ci=speedup_interval(e2e[0], e2e[1]),
        speedup_decode_over_hf_generate=speedup(decode[2], decode[1]),
        speedup_e2e_over_hf_generate=speedup(e2e[2], e2e[1]),
        tau=tau, alpha=alpha_, lossless=True,
    )  # fmt: skip


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
    both = [(a, b) for a, b in zip(plain, ours, strict=True) if a.tokens and b.tokens]
    return speedup(*map(list, zip(*both, strict=True))) if both else None


def _shown(interval: tuple[float, float] | None) -> str:
    return f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def _says(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "too few prompts to tell whether it pays"
    low, high = interval
    return "this draft pays" if low > 1 else "this draft does not pay" if high < 1 else "too close to 1 to tell"


def _costs(runs: Sequence[PromptRun], rounds: Sequence[Round], latency: Latency, threads: int) -> Costs:
    whole = sum(r.round_s for r in rounds) or float("nan")
    draft, verify = sum(r.draft_s for r in rounds), sum(r.verify_s for r in rounds)
    forwards = verify + sum(r.draft_forward_s for r in rounds)
    arms = {"plain": "plain", "speculative": "speculative", "hf_generate": "hf"}
    paces = {name: [getattr(run, arm).decode for run in runs] for name, arm in arms.items()}
    return Costs(
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
