"""The typed result of a measurement: report.json. docs/measuring.md explains each number."""

from typing import Any, Literal

from pydantic import BaseModel

from eval.certificate import Certificate, Divergence
from eval.figures import PromptFigures
from eval.footprint import Footprint
from eval.gap import Gap
from eval.predict import Oracle, Prediction
from eval.stats import Interval


class Verdict(BaseModel):
    """The headline. Without a passed certificate there is no speed-up, and `line` says so."""

    line: str
    speedup_decode: float | None
    speedup_decode_ci: Interval | None
    speedup_decode_without_repeats: float | None
    speedup_e2e: float | None
    speedup_e2e_ci: Interval | None
    speedup_decode_over_hf_generate: float | None
    speedup_e2e_over_hf_generate: float | None
    tau: float
    alpha: float
    lossless: bool


class MeasuredCosts(BaseModel):
    """c, v, o in plain steps, from this run's latency profile; `verify_by_width` is v(n), `intervals` are of the
    medians, v(n) under "v(n)". Paces are of the measured run. `repeat_spread` is the largest difference between repeats
    of one arm on one prompt ÷ their median, where there are any.
    """

    plain_step_s: float
    c: float
    v: float
    o: float
    verify_by_width: dict[int, float]
    intervals: dict[str, Interval]
    loop_efficiency: float
    round_ms: dict[str, float]
    tokens_per_s: dict[str, float]
    threads: int
    repeat_spread: float | None


class Positions(BaseModel):
    """a_j and A_j for j = 1..γ: as decoded (None where no round reached j), and as replayed on plain target text."""

    conditional: list[float | None]
    conditional_ci: list[Interval | None]
    joint: list[float | None]
    joint_ci: list[Interval | None]
    replayed_conditional: list[float]
    replayed_conditional_ci: list[Interval | None]
    replayed_joint: list[float]
    replayed_joint_ci: list[Interval | None]


class Acceptance(BaseModel):
    """α and τ as replayed on plain text, τ (micro, macro), d and drafted tokens as decoded; intervals over prompts."""

    alpha: float
    alpha_ci: Interval | None
    tau: float | None
    tau_ci: Interval | None
    tau_macro: float | None
    tau_replayed: float | None
    tau_replayed_ci: Interval | None
    accepted_share: float | None
    drafted_per_round: float


class Category(BaseModel):
    prompts: int
    tokens: int
    tau: float
    alpha: float
    accepted_share: float | None
    speedup_decode: float | None
    speedup_decode_ci: Interval | None
    speedup_decode_without_repeats: float | None
    repeated_text_share: float


class SweepPoint(BaseModel):
    """One more run of some prompts, at another γ (None: auto) or temperature, or with another `draft`."""

    draft: str | None = None
    num_draft_tokens: int | None
    temperature: float
    prompts: int
    tau: float | None
    speedup_decode: float | None
    speedup_decode_ci: Interval | None


class BatchPoint(BaseModel):
    """As many prompts decoded together. Tokens per second are of all of them."""

    batch: int
    prompts: int
    plain_tokens_per_s: float | None
    speculative_tokens_per_s: float | None
    tau: float | None
    speedup_decode: float | None


class ContextPoint(BaseModel):
    """Decoding after a text of so many tokens. Costs are in plain steps there, of a round as it was drafted."""

    tokens: int
    prefill_s: float
    plain_step_s: float
    draft_cost: float | None
    verify_cost: float | None
    tau: float | None
    speedup_decode: float
    kv_gib_per_1000_tokens: float


class PrefixReuse(BaseModel):
    """Prompts read in turn, with a cache of what they share with earlier ones and without. No part of any speed-up."""

    prompts: int
    prompt_tokens: int
    reused_tokens: int
    hit_rate: float
    prefill_s: float
    prefill_with_cache_s: float


class Piece(BaseModel):
    """A token of a sample. p and q are of drafted ones; a rejected one is not in the answer."""

    text: str
    kind: Literal["prefill", "accepted", "rejected", "own"]
    p: float | None = None
    q: float | None = None


class Sample(BaseModel):
    id: str
    category: str
    prompt: str
    pieces: list[Piece]


class Overlap(BaseModel):
    """Prompts of the suite that share `words` words in a row with a row that the draft was trained on, or are a shorter
    text of one."""

    words: int
    training_rows: int
    prompts: list[str]


class Report(BaseModel):
    """Everything a measurement found. Schema version 2."""

    schema_version: Literal[2] = 2
    verdict: Verdict
    settings: dict[str, Any]
    latency: MeasuredCosts
    positions: Positions
    acceptance: Acceptance
    other_tools: dict[str, float | None]
    predicted_speedup: float | None
    predicted: list[Prediction]
    recommended_num_draft_tokens: int
    gap: Gap | None
    oracle: Oracle | None
    categories: dict[str, Category]
    lengths: list[SweepPoint]
    temperatures: list[SweepPoint]
    lookups: list[SweepPoint] = []
    batches: list[BatchPoint] = []
    contexts: list[ContextPoint] = []
    prompt_cache: PrefixReuse | None = None
    footprint: Footprint
    repeated_text_share: float
    training_overlap: Overlap | None
    training: dict[str, Any] | None
    certificate: Certificate
    divergences: list[Divergence]
    samples: list[Sample]
    prompts: list[PromptFigures]
    provenance: dict[str, Any]
