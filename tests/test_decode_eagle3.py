"""The feature draft: lossless, its cache that of a fresh run, and live acceptance that of the training-time unroll."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import CASES, make_llama
from enumeration import exact_law, largest_difference

import decode
from configs.errors import UserError
from decode.drafts.eagle3 import Eagle3Draft
from decode.drafts.eagle3_model import unroll
from decode.generation import Settings, generate_ids
from decode.kv import Reader
from decode.laws import Law
from decode.length import Auto, Costs
from decode.models import load_model
from decode.stops import Stops
from decode.verify import VERIFIERS
from distill.batches import collate
from distill.build import build_eagle3_draft, save_draft
from distill.objectives import objective
from distill.rows import Row
from distill.step import DistillStep
from distill.students import Eagle3Student
from distill.teacher import Teacher
from eval.replay import replay_text

PROMPT = [5, 9, 30, 41, 7]
PROMPTS = [PROMPT, PROMPT[:1], PROMPT * 6]


def feature_draft(target, taps=(0, 1, 3), ids=None):
    model = build_eagle3_draft(target, taps, ids, seed=0)
    return Eagle3Draft(model.to(target.dtype).eval(), target.get_input_embeddings())


@pytest.fixture(scope="module")
def target():
    return make_llama(90, layers=3, seed=5)


@pytest.fixture(scope="module")
def draft(target):
    """Trained for some seconds on the very texts of the tests, so that it is right now and then."""
    draft, teacher = feature_draft(target), Teacher(target)
    asked = [(prompt, Settings(Law(t), 50, seed=3)) for prompt in PROMPTS for t in (0.0, 0.8)]
    rows = []
    for prompt, settings in asked:
        answer = generate_ids(target, None, prompt, settings).token_ids
        rows.append(Row(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    batch = collate([[row] for row in rows], torch.device("cpu"))
    last, tapped = teacher.read(batch.ids, batch.predicts, taps=draft.taps)
    inputs = {"ids": batch.ids, "predicts": batch.predicts, "tapped": tapped, "embedded": teacher.embedded(batch.ids)}
    step = DistillStep(Eagle3Student(draft.model.requires_grad_(), 3), objective("forward_kl"))
    optimizer = torch.optim.AdamW(draft.model.parameters(), lr=3e-3)
    for _ in range(120):
        step({"hidden": last, "head": teacher.head_weight}, **inputs)[0].div(batch.predicts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.model.eval().requires_grad_(False)
    return draft


def chain_rule_law(target, prompt, law, tokens):
    """The target's law of the next tokens, each text's probability from one plain pass of its own."""
    texts = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for text, probability in texts.items():
            row = law(target(torch.tensor([[*prompt, *text]])).logits[0, -1:])[0]
            longer |= {(*text, token): probability * p for token, p in enumerate(row.tolist()) if p > 0}
        texts = longer
    return texts


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("law", [Law(1.0), Law(0.7, top_k=2), Law(0.0)], ids=str)
def test_every_branch_of_decoding_together_has_the_targets_law(law, verifier):
    target = make_llama(3, layers=2, seed=4).double()
    draft = feature_draft(target, taps=(0, 1, 2), ids=torch.tensor([0, 2]))
    gamma = 1 if verifier == "match" else 2
    settings = Settings(law, gamma + 2, gamma, verifier=verifier)
    found = exact_law(lambda draws: tuple(generate_ids(target, draft, [1, 2], settings, draws=draws).token_ids))
    assert largest_difference(found, chain_rule_law(target, [1, 2], law, gamma + 2)) < 1e-9


@pytest.mark.parametrize("gamma", [1, 2, 4, Auto(Costs(0.05, 0.02, {n: 1.0 + 0.03 * n for n in range(1, 7)}))])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_equal_plain_ones(target, draft, prompt, gamma):
    settings = Settings(Law(0.0), 40, gamma)
    plain = generate_ids(target, None, prompt, settings)
    drafted = generate_ids(target, draft, prompt, settings)
    assert drafted.token_ids == plain.token_ids
    assert drafted.tally.accepted > 5  # else the test would say little


def test_a_sampled_answer_with_shared_noise_equals_the_plain_one(target, draft):
    for seed in range(6):
        settings = Settings(Law(0.8), 30, 3, seed=seed, seed_exact=True)
        plain, drafted = (generate_ids(target, arm, PROMPT, settings).token_ids for arm in (None, draft))
        assert plain == drafted


def features(target, text, taps):
    reader = Reader(target, taps=taps)
    reader.read(text[:, :-1])
    return reader.tapped


def test_its_cache_is_that_of_a_fresh_run_on_the_committed_text(target, draft, monkeypatch):
    """After every proposal of a real run, whatever was rejected before."""
    states = []
    propose = Eagle3Draft.propose

    def noting(self, state, *arguments):
        proposal = propose(self, state, *arguments)
        states.append((state.text.clone(), [part.clone() for part in state.past]))
        return proposal

    monkeypatch.setattr(Eagle3Draft, "propose", noting)
    generate_ids(target, draft, PROMPT, Settings(Law(0.9), 30, 3, seed=1))
    assert len(states) > 5
    for text, past in states:
        fresh = draft.start(text, features(target, text, draft.taps))
        for found, wanted in zip(past, fresh.past, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("law", [Law(0.0), Law(0.8)], ids=["greedy", "sampled"])
def test_live_acceptance_at_each_position_is_the_replayed_one_on_the_same_text(target, draft, law):
    """Round by round: q of every drafted token whose forerunners were accepted, from the unroll of one pass."""
    answer = generate_ids(target, draft, PROMPT, Settings(law, 50, 4, seed=3, stops=Stops()))
    text = torch.tensor([PROMPT + answer.token_ids])
    places = torch.arange(len(PROMPT) - 1, text.shape[1] - 1)
    with torch.no_grad():
        p = law(target(text[:, :-1]).logits[0, places])
        drafted = draft.replayed(text, features(target, text, draft.taps), places, 4)
        replay = replay_text(p, [law(logits[0]) for logits in drafted], text[0, places + 1])
    at, compared = 0, set()
    for done in answer.rounds:
        for j in range(done.accepted + 1):  # the place of the first rejected one is known too
            if j < len(done.drafted) and at + j < len(replay):
                assert done.overlap[j] == pytest.approx(replay.number(j).overlap[at + j], abs=1e-5)
                compared.add(j)
        at += len(done.tokens)
    assert compared >= {0, 1, 2}


def test_an_unrolled_step_is_what_drafting_from_that_entry_alone_gives(target, draft):
    """Every anchor: read the text up to it, then feed the true tokens one by one along the chain."""
    text = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    tapped = torch.stack([features(target, row.unsqueeze(0), draft.taps)[0] for row in text])
    embedded, fused = draft.embeddings(text[:, 1:]), draft.model.fc(tapped)
    positions = torch.arange(11).expand(2, -1)
    with torch.no_grad():
        outputs = unroll(draft.model, embedded, fused, positions, steps=3)
        later = unroll(draft.model, embedded, fused, positions, steps=3, first=5)
        for one, other in zip(outputs, later, strict=True):
            torch.testing.assert_close(one[:, 5:], other, atol=1e-5, rtol=1e-5)
        for anchor in range(11):
            whole = slice(0, anchor + 1)
            hidden, past = draft.model(embedded[:, whole], fused[:, whole], positions[:, whole], first=anchor)
            for step, found in enumerate(outputs):
                torch.testing.assert_close(found[:, anchor : anchor + 1], hidden, atol=1e-5, rtol=1e-5)
                at = anchor + step + 1
                if at >= 11:
                    break
                hidden, past = draft.model(embedded[:, at : at + 1], hidden, positions[:, at : at + 1], past)


def test_texts_that_share_a_sequence_do_not_see_each_other(target, draft):
    a, b = (torch.randint(3, 90, (1, n), generator=torch.Generator().manual_seed(n)) for n in (7, 9))
    together = torch.cat([a, b], dim=1)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).unsqueeze(0)
    with torch.no_grad():
        tapped = torch.cat([target(x, output_hidden_states=True).hidden_states[2] for x in (a, b)], dim=1)
        embedded = draft.embeddings(together[:, 1:])
        packed = unroll(draft.model, embedded, tapped[:, :-1], positions[:, :-1], steps=2)
        alone = unroll(draft.model, draft.embeddings(b[:, 1:]), tapped[:, 7:-1], torch.arange(8).unsqueeze(0), steps=2)
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one[:, 7 : 7 + 6], other[:, :6], atol=1e-5, rtol=1e-5)


@pytest.fixture
def folder(tiny_target, tmp_path):
    """A saved draft, and its target."""
    target = load_model(str(tiny_target))
    ids = torch.arange(0, 320, 2)[: len(target.tokenizer) // 2]
    save_draft(build_eagle3_draft(target.model, (1, 2), ids, 0), target, "eagle3", {}, tmp_path / "draft")
    return target, tmp_path / "draft"


def test_a_draft_folder_comes_back_and_decodes(folder):
    target, path = folder
    draft = decode.load_draft(target, str(path))
    assert draft.taps == (1, 2)
    assert draft.ids.tolist() == list(range(0, 2 * len(draft.ids), 2))
    built = build_eagle3_draft(target.model, (1, 2), draft.ids, 0)
    for (name, one), (_, other) in zip(built.state_dict().items(), draft.model.state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    asked = {"max_new_tokens": 20, "num_draft_tokens": 3}
    answer = decode.generate(target, draft, "Who sells tea?", **asked)
    assert answer.token_ids == decode.generate(target, None, "Who sells tea?", **asked).token_ids


def test_the_tensors_and_the_config_are_those_that_engines_read(folder):
    from safetensors import safe_open

    _, path = folder
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (1, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert config["num_aux_hidden_states"] == 2
    width = config["hidden_size"]
    with safe_open(path / "model.safetensors", "pt") as content:
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    attention = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    norms = {f"layers.0.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert set(shapes) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *attention, *mlp, *norms}
    assert shapes["fc.weight"] == (width, 2 * width)
    assert shapes["layers.0.self_attn.q_proj.weight"][1] == 2 * width
    assert shapes["d2t"] == shapes["lm_head.weight"][:1]
    assert shapes["t2d"] == (config["vocab_size"],)


def test_a_feature_draft_is_no_target_and_fits_no_other_one(folder, tmp_path):
    target, path = folder
    with pytest.raises(UserError, match="no model without its target"):
        load_model(str(path))
    other = replace(target, model=make_llama(len(target.tokenizer), layers=3, seed=0, width=48))
    with pytest.raises(UserError, match="hidden states of width 32"):
        decode.load_draft(other, str(path))
    shallow = replace(target, model=make_llama(len(target.tokenizer), layers=1, seed=0))
    with pytest.raises(UserError, match="does not have"):
        decode.load_draft(shallow, str(path))
    stale = tmp_path / "stale"
    shutil.copytree(path, stale)
    config = json.loads((stale / "config.json").read_text())
    config["draftsmith"]["vocabulary_map_hash"] = "0" * 16
    (stale / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="vocabulary map"):
        decode.load_draft(target, str(stale))
    config["draft_vocab_size"] += 1
    (stale / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="fit its config"):
        decode.load_draft(target, str(stale))


def test_a_copy_in_float32_leaves_the_draft_as_it_is(target):
    half = copy.deepcopy(target).bfloat16()
    draft = feature_draft(half)
    exact = draft.in_float32()
    assert (draft.model.dtype, exact.model.dtype) == (torch.bfloat16, torch.float32)
    assert exact.embeddings.weight.dtype == torch.float32


def test_the_frequencies_of_rope_stay_exact_when_a_draft_is_cast(folder):
    """Rounded to bfloat16 they turn the keys of a long text the wrong way."""
    target, path = folder
    exact, cast = (decode.load_draft(target, str(path), dtype).model for dtype in ("float32", "bfloat16"))
    assert cast.fc.weight.dtype == torch.bfloat16
    assert torch.equal(cast.rotary.inv_freq, exact.rotary.inv_freq)
    assert torch.equal(copy.deepcopy(cast).float().rotary.inv_freq, exact.rotary.inv_freq)


def test_a_target_of_another_build_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="needs a Llama-like target"):
        build_eagle3_draft(other, (0, 1), torch.arange(50), 0)


def test_e02_the_map_lies_in_the_weights_and_a_bad_one_is_refused(tiny_target, tmp_path):
    from safetensors.torch import load_file, save_file

    case = json.loads((CASES / "E02" / "mapping_32.json").read_text())
    kept = torch.tensor(case["kept_ids_by_count"])
    target = load_model(str(tiny_target))
    wide = replace(target, model=make_llama(512, layers=2, seed=0))
    save_draft(build_eagle3_draft(wide.model, (0, 1, 2), kept, 0), wide, "eagle3", {}, tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (32, 512)
    assert weights["d2t"].dtype == torch.int64
    assert weights["d2t"].tolist() == case["d2t_offset_form"]
    assert (torch.arange(32) + weights["d2t"]).tolist() == case["kept_ids_by_count"]
    assert (weights["t2d"].dtype, int(weights["t2d"].sum())) == (torch.bool, 32)
    assert weights["t2d"].nonzero().flatten().tolist() == case["kept_ids_by_count"]

    other = {
        "d2t": torch.arange(32),
        "t2d": torch.zeros(512, dtype=torch.bool).index_fill(0, 2 * torch.arange(32), True),
    }
    for number, (changed, words) in enumerate(
        [
            ({"d2t": torch.zeros(32, dtype=torch.long)}, "d2t and t2d do not name the same ids"),
            ({"d2t": -torch.arange(32)}, "does not map to different ids"),
            ({"t2d": None}, "do not fit its config"),
            (other, "vocabulary map inside it"),  # sound, but of another run
        ]
    ):
        path = tmp_path / f"bad-{number}"
        shutil.copytree(tmp_path / "draft", path)
        save_file({k: v for k, v in (weights | changed).items() if v is not None}, path / "model.safetensors")
        with pytest.raises(UserError, match=words):
            decode.load_draft(wide, str(path))

    save_draft(build_eagle3_draft(wide.model, (0, 1, 2), None, 0), wide, "eagle3", {}, tmp_path / "whole")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert decode.load_draft(wide, str(tmp_path / "whole")).ids is None


def family(name):
    """A tiny target of each family that the draft's Llama body is built from."""
    shape = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    extra = {"Qwen3": {"head_dim": 8}, "Mistral": {"sliding_window": None, "head_dim": 8}}.get(name, {})
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**shape, **extra)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_targets_of_llama_like_families_get_a_draft_that_is_lossless(name):
    target = family(name)
    draft = feature_draft(target, taps=(1, 2, 3))
    assert draft.model.layers[0].self_attn.q_proj.bias is None  # as the engines' Llama body
    for settings in (Settings(Law(0.0), 30, 3), Settings(Law(0.9), 30, 2, seed=1, seed_exact=True)):
        plain, drafted = (generate_ids(target, arm, PROMPT, settings).token_ids for arm in (None, draft))
        assert plain == drafted
