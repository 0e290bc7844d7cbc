"""Checks of a draft that is a causal language model of its own."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from configs.errors import UserError
from decode.drafts.head import SIZE
from decode.models import UNLOADABLE, first_line, load_tokenizer
from decode.trust import code_arguments
from train.publish.file_checks import RETRAIN
from train.publish.findings import DraftFolder, Finding, compare_tensors, note

HEAD = "lm_head.weight"
NOISE = "Loaders fill what they miss with noise"


def plain_checks(folder: DraftFolder) -> Iterator[Finding]:
    """What an engine, or transformers, would stumble over."""
    config = folder.config
    names = config.get("architectures") or []
    endings = ("ForConditionalGeneration",) if config.get("is_encoder_decoder") else ("ForCausalLM", "LMHeadModel")
    if not any(str(name).endswith(endings) for name in names):
        yield Finding(
            f"architectures is {names}", "Engines choose the model's class by it, and know none of that name",
            "write the class that it was trained as, e.g. LlamaForCausalLM",
        )  # fmt: skip
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(folder.headers):
        yield Finding(
            f"num_hidden_layers is {layers}, and there are {len(folder.headers)} tensors",
            "Weights and config are of two different drafts", RETRAIN,
        )  # fmt: skip
        return
    encoder, decoder = config.get("num_layers"), config.get("num_decoder_layers")
    if isinstance(encoder, int) and isinstance(decoder, int) and encoder < decoder:
        yield Finding(
            f"the encoder has {encoder} layers and the decoder {decoder}",
            "transformers' generate makes a cache for as many layers as the encoder has, and fails",
            "train a draft with more of draft.encoder_layers",
        )  # fmt: skip
    if config.get(SIZE):
        yield from _trimmed(folder)
    else:
        yield from _loaded(folder)
    yield from _tokenizer(folder)


def _loaded(folder: DraftFolder) -> Iterator[Finding]:
    """transformers' own word on which tensors it misses, does not read, or finds in another shape."""
    try:
        loader = AutoModelForSeq2SeqLM if folder.config.get("is_encoder_decoder") else AutoModelForCausalLM
        model, said = loader.from_pretrained(
            folder.path,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **code_arguments(),
        )
    except UNLOADABLE as error:
        yield Finding(f"transformers makes no language model of it ({first_line(error)})", "Nor do engines", RETRAIN)
        return
    tied = bool(model.config.tie_word_embeddings)
    missing = sorted(name for name in said["missing_keys"] if not (tied and name == HEAD))
    for what, keys in (("missing tensors", missing), ("tensors that nothing reads", sorted(said["unexpected_keys"]))):
        if keys:
            yield Finding(f"{what}: {', '.join(map(str, keys[:6]))}", NOISE, RETRAIN)
    for name, stored, wanted in said["mismatched_keys"]:
        what = f"{name} is {list(stored)}, and config.json makes it {list(wanted)}"
        yield Finding(what, "Weights and config are of two different drafts", RETRAIN)
    yield from _tied(folder, model, tied)


def _tied(folder: DraftFolder, model: Any, tied: bool) -> Iterator[Finding]:
    tables = [
        name for name in folder.headers if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))
    ]
    if not (tied and HEAD in folder.headers and len(tables) == 1):
        return
    head, table = folder.tensor(HEAD), folder.tensor(tables[0])
    if head.shape != table.shape or not torch.equal(head, table):
        yield Finding(
            "tie_word_embeddings is true, but head and embeddings differ",
            "A loader ties them, and the trained head is lost", "write tie_word_embeddings false",
        )  # fmt: skip


def _trimmed(folder: DraftFolder) -> Iterator[Finding]:
    """A head over part of the vocabulary, as only we write it."""
    rows = int(folder.config[SIZE])
    yield note(
        f"the head has {rows} of {folder.config.get('vocab_size')} rows", "Only draftsmith decodes with it",
        "draftsmith export writes the whole head for engines",
    )  # fmt: skip
    try:
        config = AutoConfig.from_pretrained(folder.path, **code_arguments())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except UNLOADABLE as error:
        yield Finding(f"its config makes no causal language model ({first_line(error)})", "Nothing loads it", RETRAIN)
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes |= {HEAD: (rows, shapes[HEAD][1]), "draft_ids": (rows,)}
    yield from compare_tensors(folder.headers, shapes, RETRAIN)


def _tokenizer(folder: DraftFolder) -> Iterator[Finding]:
    try:
        load_tokenizer(str(folder.path))
    except UserError as error:
        yield Finding(
            f"no tokenizer that can be loaded ({error})", "SGLang compares the two, and people decode with the folder",
            "copy the target's tokenizer files into it",
        )  # fmt: skip
