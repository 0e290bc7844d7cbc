"""The same trace in other tools' words, so that a figure of theirs can be put beside one of ours.

They differ in what a round's own token, a round without a draft and the prefill mean to them. Where a tool also counts
drafted tokens that it accepted after the end of an answer (vLLM, EAGLE), ours are cut there: theirs can be higher by up
to γ ÷ rounds of an answer.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from decode.trace import Tally
from eval.live import PromptRun

Figure = Callable[[Sequence[PromptRun]], float | None]


def tally(runs: Sequence[PromptRun]) -> Tally:
    """Counts over all rounds of the runs."""
    return Tally.of([done for run in runs for done in run.trace.rounds])


def vllm_acceptance_rate(runs: Sequence[PromptRun]) -> float | None:
    """Accepted ÷ drafted tokens; our d. Falls as γ grows, whatever the draft."""
    return tally(runs).accepted_share


def vllm_mean_length(runs: Sequence[PromptRun]) -> float | None:
    """1 + accepted ÷ rounds that drafted: the target's own token counts in each, whether it was emitted or not."""
    drafting = [done for run in runs for done in run.trace.rounds if done.drafted]
    return 1 + sum(done.accepted for done in drafting) / len(drafting) if drafting else None


def eagle_tau(runs: Sequence[PromptRun]) -> float | None:
    """1 + accepted ÷ all rounds (Li et al. 2024): as vLLM's, rounds without a draft included."""
    counts = tally(runs)
    return 1 + counts.accepted / counts.rounds if counts.rounds else None


def spec_bench_mat(runs: Sequence[PromptRun]) -> float | None:
    """Mean accepted tokens (Xia et al. 2024): emitted tokens of a round, its own token in; our τ (micro)."""
    return tally(runs).tau


def spec_bench_speedup(runs: Sequence[PromptRun]) -> float | None:
    """Mean of tokens ÷ second over prompts, ÷ that of plain decoding, prefill in: short fast prompts weigh more."""
    ours, plain = (
        [timed.tokens / timed.seconds for timed in arm if timed.tokens]
        for arm in ([run.speculative.end_to_end for run in runs], [run.plain.end_to_end for run in runs])
    )
    return fmean(ours) / fmean(plain) if ours and plain else None


def gpt_fast_mean_accepted(runs: Sequence[PromptRun]) -> float | None:
    """Accepted ÷ rounds, the target's own token out."""
    counts = tally(runs)
    return counts.accepted / counts.rounds if counts.rounds else None


FIGURES: dict[str, Figure] = {
    "vLLM acceptance rate": vllm_acceptance_rate,
    "vLLM mean length": vllm_mean_length,
    "EAGLE τ": eagle_tau,
    "Spec-Bench MAT": spec_bench_mat,
    "Spec-Bench speed-up": spec_bench_speedup,
    "gpt-fast mean accepted": gpt_fast_mean_accepted,
}


def in_other_words(runs: Sequence[PromptRun], lossless: bool) -> dict[str, float | None]:
    """Every figure by its name; without a passed certificate none that claims a speed-up."""
    return {name: figure(runs) for name, figure in FIGURES.items() if lossless or figure is not spec_bench_speedup}
