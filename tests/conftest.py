"""Tiny real models, made from configs, and the real target."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models; and two test processes share two cores

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "cases"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CORPUS = [
    "The old pump measures the long list under the bridge.",
    "Our baker repairs the blue gate near the harbour before noon.",
    "Which clerk sells warm tea? My neighbour sells some warm tea.",
    "user assistant system",
]


def make_tokenizer(extra_text: str = "") -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator([*CORPUS, extra_text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_llama(vocabulary: int, layers: int, seed: int, width: int = 32, context: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_t5(vocabulary: int, layers: int, seed: int, model_type: str = "t5", **config: Any) -> Any:
    """A random model of the T5 family, as it was first published unless `config` says otherwise."""
    torch.manual_seed(seed)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_decoder_layers": layers, "num_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(
            model_type,
            vocab_size=vocabulary,
            initializer_factor=1.5,
            decoder_start_token_id=0,
            n_positions=64,
            **(shape | config),
        )
    ).eval()


def make_t5_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 pad, 1 end, as T5's; a text gets an end token, and there is no chat template."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory) -> Path:
    """A random encoder–decoder target of three decoder layers, with rows of vocabulary that no token has."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    make_t5(320, layers=3, seed=0, **FLAN).save_pretrained(folder)
    make_t5_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_target(tokenizer, tmp_path_factory) -> Path:
    """A three-layer random target with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("models") / "target"
    make_llama(len(tokenizer), layers=3, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_draft(tiny_target, tmp_path_factory) -> Path:
    """The first two layers of the tiny target: it agrees often, but not always."""
    from decode.models import load_model
    from distill.build import build_lm_draft, save_draft

    target = load_model(str(tiny_target))
    folder = tmp_path_factory.mktemp("models") / "draft"
    save_draft(build_lm_draft(target.model, (0, 1)), target, "lm", {}, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = ROOT / "models" / "smollm2-135m-instruct"
    assert folder.is_dir(), "models/smollm2-135m-instruct is missing: run `make setup`"
    return folder


@pytest.fixture(scope="session")
def answers(tiny_target, tmp_path_factory) -> Path:
    """Forty answers of the tiny target to prompts of the demo."""
    from decode.models import load_model
    from distill.answers import DataSettings, write_answers
    from eval.suites import find_prompts

    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    lines = [json.loads(line) for line in find_prompts("demo").read_text(encoding="utf-8").splitlines()]
    short = [line for line in lines if len(line["prompt"]) < 60][:40]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in short), encoding="utf-8")
    settings = DataSettings(answers=folder / "answers.jsonl", prompts=str(prompts), max_new_tokens=24, batch_rows=20)
    write_answers(load_model(str(tiny_target)), settings, seed=0)
    return settings.answers


@pytest.fixture(scope="session")
def job(tiny_target, answers):
    """Arguments of a short run, of a one-layer draft unless `kind` says otherwise."""

    def arguments(output: Path, *more: str, kind: str = "lm") -> list[str]:
        shape = {"lm": "draft.layers=[0]", "lm from scratch": "draft.kind=lm", "eagle3": "draft.kind=eagle3"}[kind]
        return [
            f"target={tiny_target}", f"output={output}", f"data.answers={answers}", "data.held_out_rows=6",
            "data.max_new_tokens=24", shape, "train.steps=8", "train.batch_rows=8", "train.micro_rows=2",
            "train.measure_every=4", "train.save_every=2", "train.optim.learning_rate=3e-3",
            "train.optim.warmup_steps=2", *more,
        ]  # fmt: skip

    return arguments


@pytest.fixture(scope="session")
def short_suite(tmp_path_factory) -> Path:
    """Four prompts of each of four categories."""
    path = tmp_path_factory.mktemp("suite") / "short.jsonl"
    rows = [{"id": f"{c}{i}", "category": c, "prompt": f"Which {c}? " * (i + 1)} for c in "abcd" for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def measured(tiny_target, tiny_draft, short_suite, tmp_path_factory):
    """The report of a whole measurement, its folder, and the draft's folder."""
    from measurements import SWEEPS, settings_for

    from eval.measure import measure

    draft = tmp_path_factory.mktemp("drafts") / "draft"
    shutil.copytree(tiny_draft, draft)
    out = tmp_path_factory.mktemp("reports") / "report"
    trained_on = out.parent / "trained_on.jsonl"
    chats = [
        {"prompt": "which a, which A", "completion": "This one."},
        {"prompt": "And who?", "completion": "Nobody."},
    ]
    trained_on.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings = settings_for(tiny_target, draft, suite=short_suite, training_data=trained_on, **SWEEPS)
    return measure(settings, out), out, draft


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on loopback that this process, and those it starts, take for the real one."""
    import huggingface_hub
    from localhub import TOKEN, LocalHub

    with LocalHub(tmp_path / "hub", token=TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # huggingface_hub read these from the environment when it was imported; it is too late to set it.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("train.publish.access.FIRST_WAIT_S", 0.0)
        yield server
