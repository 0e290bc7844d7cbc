"""What is measured, on what, and under which law: the options of `eval`, with their help."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from decode.options import DecodeOptions


class EvalOptions(DecodeOptions):
    """The decoder's options, and how to measure under them."""

    profile_only_for_auto: ClassVar[bool] = False

    target: str = Field(description="Target: a folder, a Hub id[@revision] or a GGUF file.")
    draft: str = Field(description="Draft, named like the target; or lookup, or lookup+DRAFT.")
    suite: str = Field(
        "suite", description="One of our sets (suite, demo), a .jsonl or .parquet file, or a data set (folder, Hub id)."
    )
    suite_split: str = Field("test", description="Split of a data set.")
    suite_subset: str | None = Field(None, description="Configuration of a Hub data set that has several.")
    max_prompts: int = Field(16, ge=1, description="Prompts, taken from the categories in turn.")
    max_new_tokens: int = Field(64, ge=2, description="Tokens of each answer at most.")
    latency_profile: Path | None = Field(
        None,
        description="What S is predicted with, and auto follows: a profile.json or report.json of another process on "
        "this machine. Default: measured in this run.",
    )
    sweep_lengths: tuple[int, ...] = Field((), description="γ to measure as well; may be given several times.")
    sweep_temperatures: tuple[float, ...] = Field(
        (), description="Temperature to measure as well; may be given several times."
    )
    sweep_batches: tuple[int, ...] = Field(
        (), description="Prompts to decode together, as a further measurement; may be given several times."
    )
    sweep_contexts: tuple[int, ...] = Field(
        (), description="Tokens of text to decode after, as a further measurement; may be given several times."
    )
    lookup_prompts: int = Field(
        8, ge=0, description="Prompts decoded with drafts that need no training (lookup, lookup+DRAFT) too; 0: none."
    )
    sweep_prompts: int = Field(8, ge=1, description="Prompts of each of these further measurements.")
    training_data: Path | None = Field(
        None, description="Rows that the draft was trained on, for overlap with the suite. Default: as the draft says."
    )
    record: Path | None = Field(
        None, description="File that gets a line (predicted, measured). Default: predictions.jsonl beside --out."
    )
    verifier: Literal["token", "block", "match"] | None = Field(
        None, description="token, block or match; they differ in what is accepted when sampling. Default: block."
    )
    seed: int = Field(0, ge=0, description="Seed of the draws and of HF generate.")
    dtype: str = Field("auto", description="auto (as stored), float32, bfloat16 or float16.")
    device: str = Field("auto", description="auto (the accelerator where there is one), cpu, cuda, cuda:N.")
    threads: int = Field(0, ge=0, description="CPU threads; 0: as many as make plain decoding fastest, measured first.")
    repeats: int = Field(1, ge=1, description="Times each arm decodes each prompt; the median counts.")
    longest_draft: int = Field(8, ge=1, description="Largest γ whose speed-up is predicted, and that auto may choose.")
    fp32_prompts: int = Field(8, ge=1, description="Prompts that the certificate decodes again in float32.")
    fp32_tokens: int = Field(32, ge=1, description="Tokens of each of them.")
    law_samples: int = Field(
        200, ge=0, description="When sampling: short answers whose law the certificate tests by chi-square; 0 is none."
    )
