"""A whole measurement on tiny models."""

import json
from collections import Counter
from pathlib import Path

import pytest
import typer
from measurements import SWEEPS, settings_for

from configs.errors import UserError
from configs.records import read_records
from decode.generation import Generation
from decode.models import load_model
from decode.trace import Round
from eval.assembly import _without_repeats
from eval.live import Arm, PromptRun
from eval.measure import measure, summary_rows
from eval.overlap import row_texts, training_overlap
from eval.report import Report
from eval.stats import speedup
from eval.suites import Prompt
from eval.verb_compare import compare as compare_verb

ROOT = Path(__file__).resolve().parent.parent


def test_the_report_holds_what_it_promises(measured):
    report, out, _ = measured
    content = json.loads((out / "report.json").read_text())
    verdict = content["verdict"]
    assert set(verdict) >= {"speedup_decode", "speedup_decode_ci", "speedup_e2e", "tau", "alpha", "lossless"}
    assert verdict["speedup_decode_ci"][0] <= verdict["speedup_decode"] <= verdict["speedup_decode_ci"][1]
    assert set(content["latency"]) >= {"c", "v", "o", "plain_step_s"}
    assert len(content["positions"]["conditional"]) == len(content["positions"]["joint"]) == 3
    assert content["predicted_speedup"] > 0
    assert {name: c["prompts"] for name, c in content["categories"].items()} == dict.fromkeys("abcd", 2)
    assert content["provenance"]["versions"]["torch"]
    assert content["training"] is None
    assert Report.model_validate(content) == report


def test_replayed_and_decoded_acceptance_agree_when_greedy_in_float32(measured):
    """At T = 0 in float32 the decoder's rounds are a function of the plain text, and replay plays the same ones."""
    report, _, _ = measured
    assert report.verdict.lossless
    assert not report.divergences
    assert report.acceptance.tau == pytest.approx(report.acceptance.tau_replayed, rel=1e-9)
    assert 1.05 < report.verdict.tau < 3.95
    decoded = [x for x in report.positions.conditional if x is not None]
    assert decoded == pytest.approx(report.positions.replayed_conditional[: len(decoded)], abs=1e-9)
    assert report.positions.joint == pytest.approx(report.positions.replayed_joint, abs=1e-9)


def test_plots_and_tables_lie_beside_it_and_the_draft_takes_a_copy_along(measured):
    report, out, draft = measured
    for name in ("positions", "round"):
        assert (out / "plots" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    text = (out / "report.md").read_text()
    assert report.verdict.line in text
    assert "| a | 2 |" in text
    handed, whole = json.loads((draft / "report.json").read_text()), json.loads((out / "report.json").read_text())
    assert handed["verdict"] == whole["verdict"]
    assert handed["settings"]["draft"] == "draft"
    rounds = [row for _, row in read_records(out / "rounds.parquet")]
    assert sum(len(row["tokens"]) for row in rounds) == pytest.approx(report.verdict.tau * len(rounds))
    assert str(draft.parent) not in (draft / "report.json").read_text()
    recommended = json.loads((draft / "config.json").read_text())["draftsmith"]["recommended_num_draft_tokens"]
    assert recommended == report.recommended_num_draft_tokens
    assert load_model(str(draft)).model.config.num_hidden_layers == 2


def test_the_same_measurement_is_read_back_and_another_one_is_refused(measured, tiny_target, short_suite):
    report, out, draft = measured
    same = {"suite": short_suite, "training_data": out.parent / "trained_on.jsonl", **SWEEPS}
    assert measure(settings_for(tiny_target, draft, **same), out) == report
    with pytest.raises(UserError, match=r"another measurement.*temperature"):
        measure(settings_for(tiny_target, draft, temperature=1.0, **same), out)


def test_what_cannot_be_measured_is_refused_before_anything_is(
    measured, tiny_target, tiny_draft, short_suite, tmp_path
):
    _, out, _ = measured
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"latency": {"c": 0.1, "o": 0.1, "verify_by_width": {"1": 1, "2": 1.1}}}))
    turns = tmp_path / "turns.jsonl"
    turns.write_text(json.dumps({"turns": ["a?", "b?"]}) + "\n")
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "why " * 300}) + "\n")
    for words, changes in {
        "needs 4": {"latency_profile": profile},
        "sweep_lengths 0": {"sweep_lengths": (0,)},
        "temperature -1": {"sweep_temperatures": (-1.0,)},
        "another.*draft_revision": {"latency_profile": out / "report.json", "draft": str(tiny_target)},
        "later turns": {"compile": True, "suite": str(turns)},
        "holds 256": {"suite": str(long)},
    }.items():
        settings = settings_for(tiny_target, tiny_draft, suite=short_suite).model_copy(update=changes)
        with pytest.raises(UserError, match=words):
            measure(settings, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_rows_of_any_kind_are_looked_at_for_overlap_and_system_turns_are_not(tmp_path):
    long = "one two three four five six seven eight nine"
    rows = [{"text": f"Before it: {long}."}, {"messages": "none"}, {"messages": [
        {"role": "system", "content": "You answer in verse and never say a word too much."},
        {"role": "user", "content": "Hello."}, {"role": "assistant", "content": ""}]}]  # fmt: skip
    system = {"role": "system", "content": rows[2]["messages"][0]["content"]}
    prompts = [
        Prompt("long", "a", ({"role": "user", "content": long.upper()},), ""),
        Prompt("system", "a", (system, {"role": "user", "content": "Who?"}), ""),
        Prompt("later", "a", ({"role": "user", "content": "Who?"},), "", later_turns=(long,)),
        Prompt("hello", "a", ({"role": "user", "content": "Hello."},), ""),
    ]
    found = training_overlap(prompts, map(row_texts, rows))
    assert (found.training_rows, found.prompts) == (3, ["long", "later"])


def test_every_headline_comes_back_out_of_the_figures_of_its_prompts(measured):
    report, _, _ = measured
    prompts = report.prompts
    plain, ours = [p.plain.decode for p in prompts], [p.speculative.decode for p in prompts]
    assert speedup(plain, ours) == pytest.approx(report.verdict.speedup_decode)
    assert sum(p.emitted for p in prompts) / sum(p.rounds for p in prompts) == pytest.approx(report.verdict.tau)
    assert sum(p.overlap for p in prompts) / sum(p.places for p in prompts) == pytest.approx(report.verdict.alpha)
    low, high = report.acceptance.tau_ci
    assert low <= report.acceptance.tau <= high
    gap = report.gap
    product = gap.acceptance * gap.truncation * gap.draft * gap.verify * gap.overhead * gap.rest
    assert product == pytest.approx(gap.measured / gap.predicted)
    assert gap.acceptance == pytest.approx(1.0)  # in float32 at T = 0 replay foresees every round


def test_sweeps_measure_other_lengths_and_temperatures_on_some_prompts(measured):
    report, _, _ = measured
    assert [(p.num_draft_tokens, p.temperature, p.prompts) for p in report.lengths] == [(1, 0.0, 5), (2, 0.0, 5)]
    assert [(p.num_draft_tokens, p.temperature, p.prompts) for p in report.temperatures] == [(3, 1.0, 5)]
    replayed = {p.num_draft_tokens: p.tau for p in report.predicted}
    assert report.lengths[0].tau == pytest.approx(replayed[1], rel=0.2)
    assert all(p.speedup_decode_ci[0] <= p.speedup_decode <= p.speedup_decode_ci[1] for p in report.lengths)


def test_prompts_that_stand_in_the_training_data_are_named(measured):
    report, out, _ = measured
    assert report.training_overlap.training_rows == 2
    assert report.training_overlap.prompts == ["a1"]
    assert "training rows: 1: a1" in (out / "report.md").read_text()


def test_a_sample_is_the_answer_with_what_was_rejected_between(measured):
    report, out, draft = measured
    tokenizer = load_model(str(draft)).tokenizer
    rounds = [row for _, row in read_records(out / "rounds.parquet")]
    assert [sample.category for sample in report.samples] == list("abcd")
    for sample in report.samples:
        own = [row for row in rounds if row["id"] == sample.id]
        emitted = "".join(tokenizer.decode([token]) for row in own for token in row["tokens"])
        assert "".join(piece.text for piece in sample.pieces[1:] if piece.kind != "rejected") == emitted
        kinds = Counter(piece.kind for piece in sample.pieces)
        assert kinds["accepted"] == sum(row["accepted"] for row in own)
        assert all((piece.p is not None) == (piece.kind in ("accepted", "rejected")) for piece in sample.pieces)


def test_a_report_compared_with_itself_has_not_changed_and_a_gate_that_fails_ends_with_4(measured, capsys):
    _, out, _ = measured
    path = out / "report.json"
    compare_verb(path, path)
    assert "+0.000" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        compare_verb(path, path, min_speedup=99.0)
    assert ended.value.exit_code == 4
    assert "is below 99" in capsys.readouterr().err


def test_a_later_turn_is_asked_after_the_plain_answer_to_the_first(tiny_target, tiny_draft, tmp_path):
    suite = tmp_path / "turns.jsonl"
    suite.write_text(json.dumps({"question_id": 81, "category": "a", "turns": ["Who?", "And why?"]}) + "\n")
    report = measure(settings_for(tiny_target, tiny_draft, suite=suite), tmp_path / "out")
    assert [prompt.id for prompt in report.prompts] == ["81", "81/2"]
    assert report.categories["a"].prompts == 2
    short = load_model(str(tiny_target)).context_tokens
    suite.write_text(json.dumps({"question_id": 81, "turns": ["Who?", "why " * short]}) + "\n")
    report = measure(settings_for(tiny_target, tiny_draft, suite=suite), tmp_path / "long")
    assert [prompt.id for prompt in report.prompts] == ["81"]


def test_a_crash_in_the_last_part_loses_nothing(tiny_target, tiny_draft, short_suite, tmp_path, monkeypatch):
    from eval import measure as room

    settings = settings_for(tiny_target, tiny_draft, suite=short_suite, max_prompts=3, sweep_lengths=(1,))

    def crash(*_):
        raise RuntimeError("power cut")

    with monkeypatch.context() as broken:
        broken.setattr(room, "certify", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            measure(settings, tmp_path / "out")
    with monkeypatch.context() as broken:
        for part in ("run_prompt", "profile"):
            broken.setattr(room, part, crash)
        broken.setattr("eval.sweep.run_pair", crash)
        with pytest.raises(UserError, match=r"another measurement began here.*temperature"):
            measure(settings.model_copy(update={"temperature": 0.5}), tmp_path / "out")
        report = measure(settings, tmp_path / "out")
    assert len(report.prompts) == 3
    assert not (tmp_path / "out" / "unfinished").exists()
    (line,) = [row for _, row in read_records(tmp_path / "predictions.jsonl")]
    assert (line["predicted"], line["measured"]) == (report.predicted_speedup, report.verdict.speedup_decode)


def test_a_sampled_measurement_replays_within_chance(tiny_target, tiny_draft, short_suite, tmp_path):
    settings = settings_for(tiny_target, tiny_draft, suite=short_suite, temperature=1.0, max_prompts=16)
    report = measure(settings, tmp_path / "out")
    assert report.verdict.lossless
    assert report.acceptance.tau == pytest.approx(report.acceptance.tau_replayed, rel=0.2)
    assert "not on this run" in report.certificate.proves


def test_s06_repeats_have_their_spread_and_the_law_that_was_used_is_told(
    tiny_target, tiny_draft, short_suite, tmp_path
):
    settings = settings_for(
        tiny_target, tiny_draft, suite=short_suite, max_prompts=2, repeats=3, temperature=0.7, top_k=5, seed=4,
        law_samples=0,
    )  # fmt: skip
    report = measure(settings, tmp_path / "out")
    assert report.latency.repeat_spread > 0
    told = {name: report.settings[name] for name in ("temperature", "top_k", "top_p", "seed", "repeats")}
    assert told == {"temperature": 0.7, "top_k": 5, "top_p": 1.0, "seed": 4, "repeats": 3}
    assert report.certificate.sampled.law_p_value is None


def test_an_out_that_cannot_be_written_or_read_back_is_refused_before_anything_is_measured(
    tiny_target, tiny_draft, short_suite, tmp_path
):
    settings = settings_for(tiny_target, tiny_draft, suite=short_suite)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        measure(settings, tmp_path / "file")
    (tmp_path / "report.json").write_text('{"schema_version": 0}')
    with pytest.raises(UserError, match="not a report of this version"):
        measure(settings, tmp_path)


def test_a_measurement_with_auto_lengths_says_what_it_can_and_certifies_with_drafting(
    tiny_target, tiny_draft, short_suite, tmp_path, monkeypatch
):
    from eval import certificate

    lengths = []
    decoded = certificate.generate_ids

    def noting(target, draft, prompt_ids, settings, tokenizer=None):
        answer = decoded(target, draft, prompt_ids, settings, tokenizer)
        lengths.extend(len(done.drafted) for done in answer.rounds if draft is not None)
        return answer

    monkeypatch.setattr(certificate, "generate_ids", noting)
    settings = settings_for(tiny_target, tiny_draft, suite=short_suite, num_draft_tokens="auto")
    report = measure(settings, tmp_path / "out")
    assert report.verdict.lossless
    assert report.predicted_speedup is None
    assert report.acceptance.tau_replayed is None
    assert report.recommended_num_draft_tokens >= 1
    assert "γ = auto" in (tmp_path / "out" / "report.md").read_text()
    assert max(lengths) == 3
    profile = tmp_path / "out" / "report.json"
    again = settings_for(
        tiny_target, tiny_draft, suite=short_suite, num_draft_tokens="auto", latency_profile=profile, longest_draft=1
    )
    assert measure(again, tmp_path / "again").verdict.lossless
    assert dict(summary_rows(report))["predicted"].startswith("best γ")


def test_the_speed_up_without_repeated_text_leaves_out_its_tokens_and_their_share_of_the_time():
    """Plain: 1 s a token. Two rounds of one fresh token take 1 s each, two rounds of 9 repeated ones 0.5 s each."""
    text = [*range(10, 12), *range(20, 29), *range(20, 29)]

    def round_of(tokens, seconds):
        nothing = (0.0,) * (len(tokens) - 1)
        return Round(tuple(tokens[:-1]), len(tokens) - 1, tuple(tokens), *[nothing] * 5, 0.0, 0.0, 0.0, seconds)

    trace = Generation(text, [round_of(text[1:2], 1.0), round_of(text[2:11], 0.9), round_of(text[11:], 0.5)])
    plain, drafted = Arm(text, 0.0, 19.0), Arm(text, 0.0, 2.4)
    run = PromptRun(Prompt("a", "a", (), ""), [5], plain, drafted, plain, trace)
    # Of 19 decoded tokens the last 9 repeat: 10 fresh ones in 10 s plain, in 1.0 + 0.9 s drafted.
    assert _without_repeats([run]) == pytest.approx(10.0 / 1.9)
    whole = PromptRun(Prompt("b", "a", (), ""), [5], Arm([7] * 20, 0, 19), Arm([7] * 20, 0, 2), plain, Generation())
    assert _without_repeats([whole]) is None
