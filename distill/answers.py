"""Answers that the target samples itself: batched, resumable by row, with their provenance beside them."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.files import sha256
from configs.records import read_records
from configs.settings import StrictSettings
from decode.chat import render_prompt, user_turn_opening
from decode.hf import hf_generate
from decode.laws import Law
from decode.models import Loaded
from distill.claims import claim_file
from distill.engine import Engine
from distill.row_file import fill_file
from distill.rows import answer_faults
from distill.self_prompts import Sampler, write_prompts
from eval.suites import Prompt, find_prompts, read_prompts

SAMPLING = {
    "prompts", "self_prompts", "samples", "greedy_too", "temperature", "top_k", "top_p", "max_new_tokens", "batch_rows",
}  # fmt: skip
SELF_PROMPTS = 256


class DataSettings(StrictSettings):
    """Prompts in, target-sampled answers out."""

    answers: Path = Field(Path("runs/data/answers.jsonl"), description="Where the answers are written and read.")
    prompts: str | None = Field(None, description="Prompt file or set name; none: the target writes all user turns.")
    self_prompts: int = Field(
        0,
        ge=0,
        description="More user turns, written by the target after examples from the prompts; 0 without "
        "prompts means 256, written freely.",
    )
    samples: int = Field(1, ge=1, description="Answers to each prompt.")
    greedy_too: bool = Field(False, description="And one greedy answer to each prompt, for drafts that serve both.")
    temperature: float = Field(1.0, ge=0, description="Of the answers; 0 is greedy.")
    top_k: int = Field(0, ge=0, description="Keep the k likeliest tokens of an answer; 0 is off.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens up to this mass; 1 is off.")
    max_new_tokens: int = Field(96, ge=1, description="Answer tokens at most; a longer answer is cut there.")
    batch_rows: int = Field(32, ge=1, description="Answers sampled at a time.")
    max_tokens: int = Field(1024, ge=2, description="Training: longest row; the rest is cut.")
    on_bad_row: Literal["error", "skip"] = Field("error", description="Stop at a bad row, or skip and count it.")
    mask: Literal["all", "last"] = Field("all", description="Training: which answers of a chat are supervised.")
    text: bool = Field(False, description="Training: learn from plain `text` rows too, every token of them.")
    overflow: Literal["cut", "drop"] = Field("cut", description="Training: what becomes of a row above max_tokens.")
    drop: tuple[Literal["cut_off", "empty", "repeated"], ...] = Field(
        ("empty",), description="Training: answers of the target to leave out: cut_off, empty, repeated."
    )
    pack: bool = Field(False, description="Training: several rows share a sequence of up to max_tokens.")
    template_arguments: dict[str, Any] = Field(
        {}, description="For the chat template, e.g. enable_thinking=false; part of its fingerprint."
    )
    held_out_rows: int = Field(
        24,
        ge=0,
        description="Training: rows kept back to measure acceptance on; 0: those trained on serve.",
    )
    held_out_seed: int = Field(0, ge=0, description="Training: which rows those are, the same ones for any seed.")

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        if self.temperature == 0 and (self.samples > 1 or self.greedy_too):
            raise ValueError("data.samples and data.greedy_too have no effect at temperature 0: the answers are equal")
        return self

    @property
    def law(self) -> Law:
        return Law(self.temperature, self.top_k, self.top_p)

    @property
    def prompts_to_write(self) -> int:
        return self.self_prompts or (0 if self.prompts else SELF_PROMPTS)

    def sampling(self) -> dict[str, Any]:
        """The settings that decide what the answers are, but for the template's arguments: its fingerprint has them."""
        return self.model_dump(mode="json", include=SAMPLING)


def write_answers(target: Loaded, settings: DataSettings, seed: int, engine: Engine | None = None) -> int:
    """Answer every prompt that has no answer yet in `settings.answers`; returns the number of rows in the end.

    With an `engine` the answers are the server's, and `target` needs no weights (decode.models.describe_model).

    A row is written when its batch is done. A killed run loses no finished row, repeats none, and ends with the
    same text as an uninterrupted one: batches and their seeds depend on the prompts alone.
    Raises UserError for bad prompts, a prompt that leaves no room in the context (unless such are skipped), or a
    file of another run.
    """
    if settings.answers.suffix != ".jsonl":
        raise UserError(f"{settings.answers}: answers are written to a file whose name ends in .jsonl")
    path = find_prompts(settings.prompts) if settings.prompts else None
    bad = BadRows(settings.on_bad_row)
    prompts = read_prompts(path, bad) if path else []
    prompts, prompt_ids = _with_ids(target, prompts, settings, bad)
    for line in bad.lines():
        print(f"{path}: {line}", file=sys.stderr)
    if settings.prompts_to_write:
        user_turn_opening(target.tokenizer, target.template_arguments)  # refused before anything is written
    law = replace(settings.law, vocabulary=target.vocabulary)
    content = sha256(path) if path else None
    by = {"answered_by": "engine"} if engine else {}
    claim_file(settings.answers, target, settings.sampling() | {"seed": seed, "prompts_sha256": content} | by)
    sampled_by: Sampler = engine.answer if engine else partial(_sample_batch, target)
    if settings.prompts_to_write:
        written = write_prompts(
            target, settings.answers.with_suffix(".prompts.jsonl"), settings.prompts_to_write, prompts, sampled_by,
            settings.batch_rows, seed, by | {"prompts_sha256": content},
        )  # fmt: skip
        written, written_ids = _with_ids(target, written, settings, BadRows(settings.on_bad_row))
        both = {prompt.id for prompt in prompts} & {prompt.id for prompt in written}
        if both:
            raise UserError(
                f"{path}: the id {min(both)!r} is one of self-written prompts too; name these rows otherwise"
            )
        prompts, prompt_ids = [*prompts, *written], [*prompt_ids, *written_ids]
    asked = list(_asked(prompts, settings))

    def answer(batch: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for of_batch, its_law in ((False, law), (True, law.greedy())):
            some = [i for i in batch if asked[i].greedy == of_batch]
            ids = [prompt_ids[asked[i].prompt] for i in some]
            sampled = sampled_by(ids, its_law, settings.max_new_tokens, seed, some) if some else []
            rows += [
                _answer_row(target, prompts[asked[i].prompt], asked[i], ids)
                for i, ids in zip(some, sampled, strict=True)
            ]
        return rows

    batch_rows = max(settings.batch_rows, engine.rows_at_once) if engine else settings.batch_rows
    fill_file(settings.answers, [ask.id for ask in asked], batch_rows, answer, "answers", alone=engine is not None)
    faults = Counter(fault for _, record in read_records(settings.answers) for fault in answer_faults(record))
    for fault, count in faults.items():
        print(
            f"{settings.answers}: {count} {fault} answers; data.drop says which are left out of training",
            file=sys.stderr,
        )
    return len(asked)


@dataclass(frozen=True)
class Ask:
    """One answer to make: the id of its row, the place of its prompt, and whether it is the greedy one."""

    id: str
    prompt: int
    greedy: bool


def _asked(prompts: Sequence[Prompt], settings: DataSettings) -> Iterator[Ask]:
    """All prompts once, then all again for the next sample; the greedy answers last."""
    for number in range(settings.samples):
        for place, prompt in enumerate(prompts):
            yield Ask(f"{prompt.id}~{number}" if number else prompt.id, place, settings.temperature == 0)
    if settings.greedy_too:
        for place, prompt in enumerate(prompts):
            yield Ask(f"{prompt.id}~greedy", place, True)


def with_template(target: Loaded, settings: DataSettings) -> Loaded:
    """The target with the template's arguments of these settings."""
    return replace(target, template_arguments=settings.template_arguments)


def sample(
    target: Loaded, prompts: Sequence[Sequence[int]], law: Law, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Answers of `target` to each prompt, as one batch."""
    return hf_generate(target.model, prompts, law, max_new_tokens, target.eos_ids, seed, whole_law=law.top_p < 1)


def _sample_batch(
    target: Loaded, prompts: Sequence[Sequence[int]], law: Law, max_new_tokens: int, seed: int, numbers: Sequence[int]
) -> list[list[int]]:
    """A batch shares its draws, which its first row's number decides."""
    return sample(target, prompts, law, max_new_tokens, seed + numbers[0])


def _with_ids(
    target: Loaded, prompts: Sequence[Prompt], settings: DataSettings, bad: BadRows
) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts that the target can answer, with their token ids."""
    found: list[tuple[Prompt, list[int]]] = []
    for prompt in prompts:
        if prompt.later_turns:
            bad.notes["later user turn not asked"] += len(prompt.later_turns)
        try:
            found.append((prompt, _checked_ids(target, prompt, settings.max_new_tokens)))
        except UserError as error:
            bad.refuse(prompt.where, str(error))
    if prompts and not found:
        raise UserError("; ".join(["no prompt is left that the target can answer", *bad.lines()]))
    return [prompt for prompt, _ in found], [ids for _, ids in found]


def _checked_ids(target: Loaded, prompt: Prompt, max_new_tokens: int) -> list[int]:
    ids = render_prompt(target.tokenizer, prompt.messages, prompt.arguments(target.template_arguments))
    if len(ids) + max_new_tokens > target.context_tokens:
        raise UserError(
            f"no room in the context: {target.name} holds {target.context_tokens} tokens, "
            f"prompt and the {max_new_tokens} of an answer together"
        )
    return ids


def _answer_row(target: Loaded, prompt: Prompt, ask: Ask, answer_ids: list[int]) -> dict[str, Any]:
    text = target.tokenizer.decode(answer_ids, skip_special_tokens=True)
    return {
        "id": ask.id,
        "category": prompt.category,
        "messages": [*prompt.messages, {"role": "assistant", "content": text}],
        **({"tools": list(prompt.tools)} if prompt.tools else {}),
        "answer_ids": answer_ids,
        "greedy": ask.greedy,
        "finished": bool(answer_ids) and answer_ids[-1] in target.eos_ids,
    }
