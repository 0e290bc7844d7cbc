"""From prompts to a report with an encoder–decoder target: data, draft, training, measuring."""

import json

import pytest
import torch
from conftest import make_t5_tokenizer
from jobs import losses, run, run_here
from measurements import settings_for
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

import decode
from configs.errors import UserError
from decode.answer import prompt_ids
from decode.models import describe_model, load_model
from distill.answers import DataSettings, write_answers
from distill.batches import collate
from distill.build_encoder_decoder import cut_encoder_decoder, scratch_encoder_decoder
from distill.engine import Engine
from distill.objectives import forward_kl, objective
from distill.rows import Reading, Row, read_rows
from distill.shape import DraftSettings, make_draft
from distill.step import DistillStep
from distill.students import LMStudent
from distill.teacher import Teacher
from eval.measure import measure

TEXT = torch.tensor([[20, 21, 22, 1, 30, 31, 32, 33]])


@pytest.fixture(scope="module")
def target(tiny_t5):
    return load_model(str(tiny_t5))


@pytest.fixture(scope="module")
def t5_answers(target, tmp_path_factory):
    """Two sampled answers, and a greedy one, to each of 24 prompts."""
    folder = tmp_path_factory.mktemp("t5-answers")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Which clerk sells tea {i}?"}) + "\n" for i in range(24)))
    settings = DataSettings(
        answers=folder / "answers.jsonl", prompts=str(prompts), samples=2, greedy_too=True, max_new_tokens=16
    )
    assert write_answers(target, settings, seed=0) == 72
    return settings.answers


@pytest.fixture(scope="module")
def t5_job(tiny_t5, t5_answers):
    def arguments(output, *more):
        return [
            f"target={tiny_t5}", f"output={output}", f"data.answers={t5_answers}", "data.held_out_rows=6",
            "data.samples=2", "data.greedy_too=true", "data.max_new_tokens=16", "draft.layers=[0]", "train.steps=12",
            "train.batch_rows=8", "train.micro_rows=4", "train.measure_every=6", "train.save_every=4",
            "train.optim.learning_rate=3e-3", "train.optim.warmup_steps=2", *more,
        ]  # fmt: skip

    return arguments


def test_all_layers_make_the_target_again_and_some_are_copied_in_their_order(target):
    whole = cut_encoder_decoder(target.model, (0, 1, 2), ()).eval()
    torch.testing.assert_close(whole(input_ids=TEXT).logits, target.model(input_ids=TEXT).logits, atol=1e-3, rtol=1e-4)
    assert (target.model.config.dropout_rate, whole.config.dropout_rate) == (0.1, 0.0)
    draft = cut_encoder_decoder(target.model, (-1, 0), (1,))
    assert (draft.config.num_decoder_layers, draft.config.num_layers) == (2, 1)
    source = target.model.model.state_dict()
    for stack, new, old in (("decoder", 0, 2), ("decoder", 1, 0), ("encoder", 0, 1)):
        for name, weight in draft.model.state_dict().items():
            if name.startswith(f"{stack}.block.{new}.") and "relative_attention_bias" not in name:
                assert torch.equal(weight, source[name.replace(f"block.{new}.", f"block.{old}.", 1)])
    # The position bias of a stack lies in its first layer, whichever that is.
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert all(
        torch.equal(draft.model.state_dict()[f"{s}.{bias}"], source[f"{s}.{bias}"]) for s in ("encoder", "decoder")
    )


def test_a_draft_from_scratch_has_the_asked_for_shape_and_only_the_seed_decides_its_weights(target):
    one, again, other = (scratch_encoder_decoder(target.model, 1, 16, seed).eval() for seed in (0, 0, 1))
    assert (one.config.d_model, one.config.num_decoder_layers, one.config.num_heads) == (16, 1, 2)
    assert torch.equal(one(input_ids=TEXT).logits, again(input_ids=TEXT).logits)
    assert not torch.equal(one(input_ids=TEXT).logits, other(input_ids=TEXT).logits)


def test_what_an_encoder_decoder_draft_cannot_be_is_refused(target, tiny_target):
    for settings, said in (
        (DraftSettings(kind="eagle3"), "draft.kind eagle3"),
        (DraftSettings(vocabulary=100), r"draft\.vocabulary"),
        (DraftSettings(layers=(0, 3)), r"draft\.layers"),
        (DraftSettings(encoder_layers=(5,)), r"draft\.encoder_layers"),
        (DraftSettings(init="scratch", width=20), r"draft\.width 20"),
    ):
        with pytest.raises(UserError, match=said):
            make_draft(settings, target, [], seed=0)
    with pytest.raises(UserError, match="has no encoder"):
        make_draft(DraftSettings(layers=(0,), encoder_layers=(0,)), load_model(str(tiny_target)), [], seed=0)


def test_a_prompt_goes_to_the_encoder_and_its_completion_to_the_decoder(target, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "warm tea", "completion": "the </s> mark"}, {"question": "Who?", "answer": "Nobody."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_rows(path, target.tokenizer, Reading(64))
    source = make_t5_tokenizer()("warm tea").input_ids
    assert first.ids[: len(source)] == source
    assert first.is_answer == [False] * len(source) + [True] * (len(first.ids) - len(source))
    assert first.ids[-1] == 1
    assert first.ids.count(1) == 2  # the end of the source and that of the answer
    assert target.tokenizer.decode(first.ids[len(source) : -1]) == "the </s> mark"
    assert target.tokenizer.decode(second.ids[:-1]) == "Who?</s>Nobody."


def test_a_chat_of_several_turns_needs_a_template(target, tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"role": role, "content": "tea"} for role in ("user", "assistant") * 2]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*no chat template.*one prompt and, last, one completion"):
        read_rows(path, target.tokenizer, Reading(64))


def test_the_loss_and_its_gradients_are_those_of_plain_pytorch(target):
    """Rows of several lengths in one padded batch against each row alone through transformers' own forward."""
    draft = cut_encoder_decoder(target.model, (0, 2), (0,)).eval()
    sources, answers = [[20, 21, 22, 1], [40, 1]], [[30, 31, 1], [32, 33, 34, 35, 36, 1]]
    rows = [
        Row(source + answer, [False] * len(source) + [True] * len(answer))
        for source, answer in zip(sources, answers, strict=True)
    ]
    batch = collate([[row] for row in rows], torch.device("cpu"))
    teacher = Teacher(target.model)
    step = DistillStep(LMStudent(draft), objective("forward_kl"), chunk_tokens=3)
    signal = {"hidden": teacher.hidden(batch.ids, batch.predicts), "head": teacher.head_weight}
    loss, _ = step(signal, ids=batch.ids, predicts=batch.predicts)
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in draft.named_parameters()}
    draft.zero_grad()
    expected = torch.tensor(0.0)
    for source, answer in zip(sources, answers, strict=True):
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[0, *answer[:-1]]])}
        p, q = (model(**inputs).logits[0] for model in (target.model.model, draft.model))
        expected = expected + F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for name, weight in draft.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-4 * float(weight.grad.abs().max()))
    assert forward_kl(p, p).abs().max() == 0


@pytest.mark.parametrize(
    ("option", "said"), [("data.pack=true", r"leave data\.pack out"), ("data.text=true", "no source")]
)
def test_packed_rows_and_plain_text_are_refused(t5_job, tmp_path, option, said):
    with pytest.raises(UserError, match=said):
        run_here(t5_job(tmp_path / "run", option))


def test_a_server_is_not_asked_to_answer_for_it(tiny_t5):
    with pytest.raises(UserError, match=r"--endpoint: .* encoder–decoder"):
        Engine("http://127.0.0.1:9", "t5").check_target(describe_model(str(tiny_t5)))


def test_a_run_learns_and_ends_in_a_folder_that_transformers_drafts_with(target, t5_job, tmp_path):
    whole = run_here(t5_job(tmp_path / "whole"))
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    assert json.loads((whole / "config.json").read_text())["architectures"] == ["T5ForConditionalGeneration"]
    training = json.loads((whole / "training.json").read_text())["measured"]
    assert training["alpha_after"] > training["alpha_before"]
    draft = decode.load_draft(target, str(whole))
    plain, drafted = (decode.generate(target, one, "warm tea", max_new_tokens=24) for one in (None, draft))
    assert plain.token_ids == drafted.token_ids
    assistant = AutoModelForSeq2SeqLM.from_pretrained(whole)
    source = torch.tensor([prompt_ids(target, "warm tea")])
    how = {"max_new_tokens": 24, "do_sample": False}
    model = target.model.model
    assert torch.equal(model.generate(source, assistant_model=assistant, **how), model.generate(source, **how))


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["2 x DDP", "2 x ZeRO-3"])
def test_two_processes_give_the_losses_of_one(t5_job, tmp_path, launch):
    run_here(t5_job(tmp_path / "one", "train.steps=4"))
    done = run(t5_job(tmp_path / "two", "train.steps=4"), launch)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize("more", ["on_policy.by=draft", "on_policy.by=pair"])
def test_answers_are_rolled_out_while_it_trains(t5_job, tmp_path, more):
    run_here(t5_job(tmp_path / "run", "on_policy.fraction=1", "on_policy.max_new_tokens=8", more, "train.steps=2"))
    assert all(loss > 0 for loss in losses(tmp_path / "run"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_report_of_the_pair_is_certified(tiny_t5, t5_job, short_suite, tmp_path, temperature):
    draft = run_here(t5_job(tmp_path / "run", "train.steps=2", "train.measure_every=2"))
    report = measure(settings_for(tiny_t5, draft, suite=short_suite, temperature=temperature), tmp_path / "report")
    assert report.certificate.passed
    assert report.prompt_cache is None
    assert {row.draft for row in report.lookups} >= {"lookup", "lookup+draft"}
    for sweep in ("sweep_batches", "sweep_contexts"):
        with pytest.raises(UserError, match="encoder–decoder"):
            measure(settings_for(tiny_t5, draft, suite=short_suite, **{sweep: (2,)}), tmp_path / "other")
