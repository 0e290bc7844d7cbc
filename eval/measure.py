"""One measurement from start to end: load, profile, decode the suite, replay, certify, write."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.files import read_json, sha256
from configs.provenance import provenance
from configs.records import read_records
from decode.chat import render_prompt
from decode.compiled import uncompiled
from decode.drafts.contract import Draft
from decode.drafts.kinds import draft_revision, load_draft, looks_up, trained_part
from decode.generation import Settings
from decode.kv import Reader
from decode.length import Costs, read_costs
from decode.models import Loaded, load_model
from eval.assembly import Measured, assemble
from eval.batch_sweep import check_batches, sweep_batches
from eval.certificate import certify, divergences
from eval.contexts import check_contexts, sweep_contexts
from eval.eval_options import EvalOptions
from eval.latency import fastest_threads, profile
from eval.live import PromptRun, run_prompt
from eval.overlap import row_texts, training_overlap
from eval.prefix import prefix_reuse
from eval.record import keep_record
from eval.replay import Replay, replay_text
from eval.report import Overlap, Report
from eval.report_folder import hand_to_draft, read_back, write_report
from eval.suites import Prompt, fingerprint, read_suite, stratified
from eval.sweep import at_length, at_temperature, measured_already, sweep, without_training
from eval.under_way import UnderWay

AUTO_PROFILE_LENGTH = 3  # γ of the rounds in which c and o are measured for auto


def measure(options: EvalOptions, out: Path) -> Report:
    """Measure and write OUT/report.json, report.md, report.html, rounds.parquet and plots.

    What is done lies in OUT/unfinished until the report is written: a killed measurement goes on with it. A report of
    the same measurement is read back. Raises UserError for a bad suite or pair, and for an OUT that holds another
    measurement.
    """
    _swept(options.settings(), options)  # refuses bad values before anything is loaded
    costs = read_costs(options.latency_profile) if options.latency_profile else None
    if costs and options.num_draft_tokens != "auto" and options.num_draft_tokens + 1 not in costs.v:
        raise UserError(
            f"{options.latency_profile}: verifying was timed for up to {max(costs.v)} tokens; "
            f"γ = {options.num_draft_tokens} needs {options.num_draft_tokens + 1}"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder as --out")
    prompts = stratified(read_suite(options.suite, options.suite_split, options.suite_subset), options.max_prompts)
    target = load_model(options.target, options.dtype, options.device)
    target = replace(target, template_arguments=options.template_argument)
    draft = load_draft(target, options.draft, options.dtype, options.device)
    target = options.quantised(target, draft)
    check_batches(target, draft, options.sweep_batches)
    check_contexts(target, options.sweep_contexts)
    if options.compile and any(prompt.later_turns for prompt in prompts):
        raise UserError("compile has no room for the later turns of a chat; leave it out")
    revision = draft_revision(options.draft) + (f"+{options.quantize_draft}" if options.quantize_draft else "")
    profiled_threads = _profiled_threads(options, target, revision)
    options = options.model_copy(update={"threads": options.threads or profiled_threads})
    decoding = options.settings(target, costs)
    described = options.model_dump(mode="json", exclude={"threads", "record"}) | {
        "verifier": decoding.chosen_verifier,
        "latency_profile_sha256": sha256(options.latency_profile) if options.latency_profile else None,
        "suite_fingerprint": fingerprint(prompts),
        "target_revision": target.revision,
        "draft_revision": revision,
        "fitted_draft_temperatures": {f"{t:g}": value for t, value in draft.temperatures.items()},
        "run_dtype": str(target.model.dtype).removeprefix("torch."),
    }
    report = read_back(out / "report.json", described, options.threads)
    if report:
        print(f"{out}: measured already, read back", file=sys.stderr)
    else:
        overlap = _overlap(prompts, options)
        under_way = UnderWay(out / "unfinished", described)
        found = _run(target, draft, prompts, options, costs, under_way)
        assert under_way.profiled
        described |= {"threads": under_way.profiled.threads}
        made = provenance() | {"device": str(target.model.device)}
        report = assemble(target, draft, found, described, _training(trained_part(options.draft) or ""), overlap, made)
        write_report(report, found.runs, out)
        under_way.end()
        keep_record(options.record or out.parent / "predictions.jsonl", report)
    if not (looks_up(options.draft) or options.quantize_target or options.quantize_draft):
        hand_to_draft(report, Path(options.draft))
    return report


def _run(
    target: Loaded, draft: Draft[Any], prompts: Sequence[Prompt], options: EvalOptions, costs: Costs | None,
    under_way: UnderWay,
) -> Measured:  # fmt: skip
    """Profile, decode, sweep, replay and certify, as far as that is not done yet."""
    decoding, is_auto = options.settings(target, costs), options.num_draft_tokens == "auto"
    prompt_ids = [_checked_ids(target, prompt) for prompt in prompts]
    warm_up = min(prompt_ids, key=len)
    known = under_way.profiled
    if known and options.threads not in (0, known.threads):
        raise UserError(f"--threads {options.threads}: this measurement began with {known.threads}; name another --out")
    threads = known.threads if known else options.threads or fastest_threads(target.model, warm_up, decoding)
    if target.model.device.type == "cpu":
        torch.set_num_threads(threads)
    gamma = AUTO_PROFILE_LENGTH if options.num_draft_tokens == "auto" else options.num_draft_tokens
    longest = max(options.longest_draft, gamma, *options.sweep_lengths, max(costs.v) - 1 if costs else 0)
    if options.compile:
        texts_up_to = max(map(len, prompt_ids)), longest
        target = replace(target, model=options.compiled(target.model, *texts_up_to))
        draft = draft.compiled(lambda model: options.compiled(model, *texts_up_to))
    latency = known.latency if known else profile(target.model, draft, warm_up, decoding, gamma, longest)
    under_way.note(threads, latency)
    costs = costs or latency.costs
    decoding = options.settings(target, costs) if is_auto else decoding
    for number, first in enumerate(track(prompts, "decoding the suite")):
        for prompt, ids in _turns(target, first, under_way):
            if prompt.id not in under_way.runs:
                under_way.add(run_prompt(target, draft, prompt, ids, decoding, options.repeats, first=number))
    runs = list(under_way.runs.values())
    if not any(run.trace.rounds for run in runs):
        raise UserError("every answer ended with its first token, so there is nothing to measure; use other prompts")
    few = prompt_ids[: options.sweep_prompts]
    lengths, temperatures = _swept(decoding, options)
    others = without_training(options.draft, draft, target) if options.lookup_prompts else []
    compared = [under_way.runs[prompt.id] for prompt in prompts[: options.lookup_prompts]]
    lookups = [(name, other, decoding) for name, other in others]
    return Measured(
        lengths=sweep(target, few, [(None, draft, one) for one in lengths], under_way.folder / "lengths.jsonl"),
        temperatures=sweep(
            target, few, [(None, draft, one) for one in temperatures], under_way.folder / "temperatures.jsonl"
        ),
        batches=sweep_batches(target, draft, few, decoding, options.sweep_batches, under_way.folder / "batches.jsonl"),
        contexts=sweep_contexts(
            target, draft, prompt_ids, decoding, options.sweep_contexts, under_way.folder / "contexts.jsonl"
        ),
        prefix=None
        if options.compile or target.model.config.is_encoder_decoder  # a source is encoded as a whole
        else prefix_reuse(target, draft, prompt_ids, decoding),
        lookups=[
            *sweep(target, prompt_ids[: options.lookup_prompts], lookups, under_way.folder / "lookups.jsonl"),
            *([measured_already(options.draft, compared, decoding)] if lookups else []),
        ],
        runs=runs,
        texts=[_replay(target, draft, run, decoding, longest) for run in track(runs, "replaying")],
        latency=latency,
        costs=costs,
        certificate=certify(
            target, draft, runs, decoding, gamma, options.fp32_prompts, options.fp32_tokens, options.law_samples
        ),
        divergences=divergences(target.model, runs, decoding),
    )


@torch.no_grad()
def _replay(target: Loaded, draft: Draft[Any], run: PromptRun, settings: Settings, longest: int) -> Replay:
    """Teacher-forced laws of both models on the plain answer, for rounds of up to `longest` drafted tokens."""
    emitted = run.plain.token_ids
    text = torch.tensor([run.prompt_ids + emitted], device=target.model.device)
    read = text[:, :-1]
    law = settings.target_law(len(run.prompt_ids), target.model.device)
    places = torch.arange(len(run.prompt_ids) - 1, read.shape[1], device=read.device)
    reader = Reader(uncompiled(target.model), taps=draft.taps)
    p = law(reader.read(read, keep=len(emitted)), read)[0]
    drafted = draft.replayed(text, reader.tapped, places, longest)
    q = (settings.draft_law(law, draft.temperatures)(logits, read)[0] for logits in drafted)
    return replay_text(p, q, text[0, places + 1], ended=emitted[-1] in target.eos_ids)


def _swept(decoding: Settings, options: EvalOptions) -> tuple[list[Settings], list[Settings]]:
    """The settings of the sweeps over lengths and temperatures. Raises UserError for what makes no sense."""
    for name, numbers in (("sweep_batches", options.sweep_batches), ("sweep_contexts", options.sweep_contexts)):
        if numbers and (min(numbers) < 1 or options.compile):
            raise UserError(f"{name}: expected numbers from 1 on, and models that are not compiled")
    lengths = [at_length(decoding, length) for length in options.sweep_lengths]
    return lengths, [at_temperature(decoding, temperature) for temperature in options.sweep_temperatures]


def _profiled_threads(options: EvalOptions, target: Loaded, revision: str) -> int:
    """The thread count of the latency profile that is asked for, 0 without one.

    Raises UserError for a profile of another target, draft or dtype, or of other threads than are asked for.
    """
    if options.latency_profile is None:
        return 0
    said = read_json(options.latency_profile).get("settings", {})
    run_dtype = str(target.model.dtype).removeprefix("torch.")
    ours: dict[str, Any] = {"target_revision": target.revision, "run_dtype": run_dtype, "draft_revision": revision}
    ours |= {"threads": options.threads} if options.threads else {}
    different = [name for name, value in ours.items() if said.get(name) not in (None, value)]
    if different:
        raise UserError(f"{options.latency_profile}: a latency profile of another {', '.join(different)}")
    return int(said.get("threads") or 0)


def _turns(target: Loaded, prompt: Prompt, under_way: UnderWay) -> Iterator[tuple[Prompt, list[int]]]:
    """A prompt and, when the plain answer is there, each later turn of it, as far as the context holds the chat."""
    following: Prompt | None = prompt
    while following:
        try:
            yield following, _checked_ids(target, following)
        except UserError as error:
            print(f"{following.id}: not asked, {error}", file=sys.stderr)
            return
        answer = under_way.runs[following.id].plain.token_ids
        following = following.next_turn(target.tokenizer.decode(answer, skip_special_tokens=True))


def _checked_ids(target: Loaded, prompt: Prompt) -> list[int]:
    ids = render_prompt(target.tokenizer, prompt.messages, prompt.arguments(target.template_arguments))
    if len(ids) >= target.context_tokens:
        raise UserError(
            f"{prompt.where}: the prompt has {len(ids)} tokens; {target.name} holds {target.context_tokens}"
        )
    return ids


def _training(draft: str) -> dict[str, Any] | None:
    """What the training hook measured, where the draft was trained here."""
    path = Path(draft) / "training.json"
    if not path.is_file():
        return None
    training: dict[str, Any] = read_json(path)
    if "measured" not in training:
        return None
    return {
        **training["measured"],
        "step": training["step"],
        "supervised_tokens_seen": training["supervised_tokens_seen"],
    }


def _overlap(prompts: Sequence[Prompt], options: EvalOptions) -> Overlap | None:
    """With the rows named, else with those that the draft's training.json names, if the same are still there."""
    path = options.training_data
    said = Path(trained_part(options.draft) or "") / "training.json"
    if path is None and said.is_file():
        training = read_json(said)
        named = Path(training.get("config", {}).get("data", {}).get("answers", ""))
        if named.is_file() and sha256(named) == training.get("data_sha256"):
            path = named
    if path is None:
        return None
    return training_overlap(prompts, (row_texts(row) for _, row in read_records(path, BadRows("skip"))))


def summary_rows(report: Report) -> Sequence[tuple[str, str]]:
    """The few lines that a terminal shows under the verdict."""
    costs, gamma = report.latency, report.settings["num_draft_tokens"]
    rows = [("costs", f"c {costs.c:.2f} · v {costs.v:.2f} · o {costs.o:.3f} plain steps")]
    if report.verdict.lossless:
        paces = " · ".join(f"{name} {value:.1f}" for name, value in costs.tokens_per_s.items())
        predicted = f"S {report.predicted_speedup:.2f}× at γ {gamma}, " if report.predicted_speedup else ""
        best = report.recommended_num_draft_tokens
        rows += [
            ("tokens/s", paces),
            ("predicted", f"{predicted}best γ {best}"),
        ]
    return [*rows, ("repeated text", f"{report.repeated_text_share:.0%}")]
