"""Encoder–decoder models: as transformers runs them, and lossless with a draft of their kind."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import FLAN, make_llama, make_t5, make_t5_tokenizer
from enumeration import exact_law, largest_difference
from transformers import BartConfig, BartForConditionalGeneration, T5Tokenizer

import decode
from configs.errors import UserError
from decode.answer import prompt_ids
from decode.chat import render_chat, render_prompt
from decode.compiled import Compiled
from decode.drafts.lm import LMDraft
from decode.drafts.lookup import LookupDraft
from decode.draws import SeededDraws
from decode.encoder_decoder import EncoderDecoder
from decode.generation import Settings, generate_ids
from decode.hf import hf_generate
from decode.kv import Reader
from decode.laws import Law
from decode.models import load_model
from decode.options import DecodeOptions
from decode.pairing import check_pair
from decode.verify import VERIFIERS

KINDS = {"T5": ("t5", {}), "FLAN-T5": ("t5", FLAN), "mT5": ("mt5", {"num_layers": 1}), "umT5": ("umt5", {})}
PROMPTS = ["Which clerk sells warm tea?", "warm tea " * 12, "a", "The old pump measures the long list."]


@pytest.fixture(scope="module")
def target(tiny_t5):
    return load_model(str(tiny_t5))


@pytest.fixture(scope="module")
def draft(target):
    """The target with some noise: right often, not always."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    return LMDraft(model)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_for_sources_of_several_lengths(kind):
    model_type, config = KINDS[kind]
    model = make_t5(60, layers=3, seed=2, model_type=model_type, **config).double()
    sources = [[5, 6, 7, 8, 9, 1], [9, 4, 1], [1]]
    answers = torch.randint(2, 60, (3, 5), generator=torch.Generator().manual_seed(0))
    texts = [torch.tensor([*source, *answer]) for source, answer in zip(sources, answers.tolist(), strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    with torch.no_grad():
        found = EncoderDecoder(model)(input_ids=padded).logits
        for row, source, answer in zip(found, sources, answers, strict=True):
            expected = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.cat([torch.tensor([0]), answer])[None]
            ).logits[0]
            torch.testing.assert_close(row[len(source) - 1 : len(source) + 5], expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_a_text_that_is_read_piece_by_piece_and_taken_back_gives_what_it_gives_at_once(target):
    text = torch.tensor([[20, 21, 22, 23, 1, 30, 31, 32, 33, 34]])
    model = copy.deepcopy(target.model).double()
    whole = model(input_ids=text).logits
    reader = Reader(model)
    assert reader.read(text[:, :2], keep=0).shape == (1, 0, 320)  # not all of the source
    torch.testing.assert_close(reader.read(text[:, 2:7]), whole[:, 2:7], atol=1e-9, rtol=1e-9)
    reader.read(torch.tensor([[50, 51, 52]]))
    reader.rewind(6)
    torch.testing.assert_close(reader.read(text[:, 6:], keep=2), whole[:, -2:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_greedy_decoding_is_that_of_transformers(kind, tmp_path):
    model_type, config = KINDS[kind]
    make_t5(320, layers=3, seed=3, model_type=model_type, **config).save_pretrained(tmp_path)
    make_t5_tokenizer().save_pretrained(tmp_path)
    target = load_model(str(tmp_path))
    ids = [prompt_ids(target, prompt) for prompt in PROMPTS]
    law = Law(0.0, vocabulary=target.vocabulary)
    expected = hf_generate(target.model, ids, law, 16, target.eos_ids, seed=0)
    assert expected == [decode.generate(target, None, prompt, max_new_tokens=16).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_greedy_output_with_a_draft_is_that_without_in_float32(target, draft, num_draft_tokens):
    tallies = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": 30, "num_draft_tokens": num_draft_tokens}
        plain, drafted = (decode.generate(target, one, prompt, **options) for one in (None, draft))
        assert drafted.token_ids == plain.token_ids
        tallies.append(drafted.totals)
    assert 0 < sum(tally.accepted for tally in tallies) < sum(tally.drafted for tally in tallies)


def test_a_sampled_answer_with_a_draft_is_the_plain_one_of_the_same_noise(target, draft):
    settings = Settings(Law(1.0, vocabulary=target.vocabulary), 30, 3, seed=5, seed_exact=True)
    for prompt in PROMPTS:
        ids = prompt_ids(target, prompt)
        plain, drafted = (generate_ids(target.model, one, ids, settings).token_ids for one in (None, draft))
        assert drafted == plain


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_speculative_output_follows_the_targets_law_exactly(verifier):
    """Every branch of the decoder's real rounds on real models, in float64; the law from transformers' own forward."""
    models = [make_t5(3, layers=1, seed=seed, num_layers=1, d_model=8, d_ff=8).double() for seed in (1, 2)]
    source, num_draft_tokens = [2, 0, 1], 1 if verifier == "match" else 2
    settings = Settings(Law(0.9), num_draft_tokens + 2, num_draft_tokens, verifier=verifier)
    target, draft = EncoderDecoder(models[0]), LMDraft(EncoderDecoder(models[1]))
    found = exact_law(lambda draws: tuple(generate_ids(target, draft, source, settings, draws=draws).token_ids))
    expected = {(): 1.0}
    for _ in range(settings.max_new_tokens):
        longer = {}
        for text, chance in expected.items():
            with torch.no_grad():
                logits = models[0](torch.tensor([source]), decoder_input_ids=torch.tensor([[0, *text]])).logits[0, -1]
            longer |= {(*text, i): chance * p for i, p in enumerate((logits / 0.9).softmax(-1).tolist())}
        expected = longer
    assert largest_difference(found, expected) < 1e-9


def test_target_and_draft_read_a_source_once(target, draft):
    calls = {"target": 0, "draft": 0}
    hooks = [
        model.model.encoder.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        for name, model in (("target", target.model), ("draft", draft.model))
    ]
    answer = decode.generate(target, draft, PROMPTS[0], max_new_tokens=20)
    for hook in hooks:
        hook.remove()
    assert len(answer.rounds) > 2
    assert calls == {"target": 1, "draft": 1}


def test_penalties_count_the_answer_alone_as_in_transformers(target, draft):
    """The start token is no part of the answer; transformers counts it, so here it is out of the question."""
    options = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3, "min_new_tokens": 6}
    law = Law(0.0, vocabulary=target.vocabulary)
    for prompt in PROMPTS:
        ids, ours = prompt_ids(target, prompt), {"max_new_tokens": 24, "logit_bias": {0: -100.0}, **options}
        plain, drafted = (decode.generate(target, one, prompt, **ours).token_ids for one in (None, draft))
        expected = hf_generate(target.model, [ids], law, 24, target.eos_ids, 0, sequence_bias={(0,): -100.0}, **options)
        assert [drafted] == [plain] == expected


def test_transformers_generate_under_a_law_with_penalties_is_plain_decoding_under_it(target):
    settings = DecodeOptions(presence_penalty=0.5, frequency_penalty=0.3, max_new_tokens=24).settings(target)
    for prompt in PROMPTS:
        ids = prompt_ids(target, prompt)
        law = settings.target_law(len(ids), torch.device("cpu"))
        plain = generate_ids(target.model, None, ids, settings).token_ids
        assert hf_generate(target.model, [ids], law, 24, target.eos_ids, 0) == [plain]


def test_a_lookup_draft_finds_what_the_answer_takes_from_the_source(target):
    draft, proposed = LookupDraft(int(target.model.config.vocab_size)), 0
    for prompt in PROMPTS:
        plain, drafted = (decode.generate(target, one, prompt, max_new_tokens=40) for one in (None, draft))
        assert drafted.token_ids == plain.token_ids
        proposed += drafted.totals.drafted
    assert proposed > 0
    text = torch.tensor([[40, 41, 42, 43, 1, 50, 40, 41]])
    found = draft.propose(draft.start(text), 2, Law(0.0), SeededDraws(0))
    assert found.tokens.tolist() == [[42, 43]]


def test_an_end_token_that_a_prompt_quotes_is_text(target):
    ids = prompt_ids(target, "What does </s> mean?")
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert target.tokenizer.decode(ids[:-1]) == "What does </s> mean?"


def test_with_the_tokenizer_of_t5_too_whose_model_knows_the_mark(target):
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁warm", "▁tea", "<", "/", "s", ">", "▁<"]
    tokenizer = T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)])
    target = replace(target, tokenizer=tokenizer)
    assert prompt_ids(target, "the warm tea") == [4, 5, 6, 1]
    ids = prompt_ids(target, "the </s> warm tea <extra_id_0>")
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert ids[-2] == tokenizer.convert_tokens_to_ids("<extra_id_0>")
    assert tokenizer.decode(ids[:-2]).replace(" ", "") == "the</s>warmtea"


def test_tools_and_template_arguments_are_refused_without_a_template(target):
    called = [{"role": "user", "content": "tea"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    for messages in (called, [*called, {"role": "user", "content": "tea"}]):
        with pytest.raises(UserError, match="tool calls"):
            (render_chat if len(messages) == 2 else render_prompt)(target.tokenizer, messages)
    with pytest.raises(UserError, match="enable_thinking: no effect"):
        decode.generate(replace(target, template_arguments={"enable_thinking": False}), None, "tea")


def test_a_source_without_its_end_is_refused(target):
    with pytest.raises(UserError, match=r"ends with the end token \(id 1\)"):
        decode.generate(target, None, [20, 21, 22])
    with pytest.raises(UserError, match="end token"):
        target.model(input_ids=torch.tensor([[20, 21]]))


def test_a_causal_draft_of_an_encoder_decoder_target_is_refused(target, tiny_t5, tmp_path):
    make_llama(320, layers=1, seed=0).save_pretrained(tmp_path)
    make_t5_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="only the target is an encoder–decoder"):
        decode.load_draft(target, str(tmp_path))
    with pytest.raises(UserError, match="only the draft is an encoder–decoder"):
        check_pair(load_model(str(tmp_path)), replace(target, name="draft"))


def test_a_draft_that_ends_its_source_with_another_id_is_refused(target):
    other = copy.deepcopy(target.model)
    other.model.config.eos_token_id = 2
    with pytest.raises(UserError, match=r"ends a source with id 2, target .* with 1"):
        check_pair(target, replace(target, model=other, name="draft"))


def test_other_families_batches_and_compiling_are_refused_by_name(target, tmp_path):
    config = BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    make_t5_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="of type bart; of these t5, mt5, umt5"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="one text at a time"):
        decode.generate_batch(target, None, PROMPTS)
    with pytest.raises(UserError, match="leave compile out"):
        Compiled(target.model, 64)
