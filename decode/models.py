"""Loading target and draft: a local folder, a Hub id with optional @revision, or a GGUF file."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from configs.errors import UserError
from decode.adapters import adapter_base, merge_adapter
from decode.attention import use_grouped_attention
from decode.drafts.feature_config import speculators_config
from decode.drafts.head import SIZE, is_feature_draft, load_trimmed
from decode.encoder_decoder import EncoderDecoder, complete_config, transformers_model
from decode.reference import Reference, parse_reference, weights_revision
from decode.trust import check_files, code_arguments, find_file, refusal_advice, weight_arguments

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, warns of what is no fault

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What transformers, huggingface_hub and safetensors raise for a folder or repository that is no whole model, or whose
# config holds something else than a config does.
UNLOADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Loaded:
    """A causal LM, or an encoder–decoder model read as one (decode/encoder_decoder.py), in evaluation mode, with its
    tokenizer and the words that say where both came from.

    `template_arguments` go to the chat template whenever it is rendered, e.g. enable_thinking=False.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str
    stored_dtype: torch.dtype
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: the generation config's, else the tokenizer's."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.tokenizer.eos_token_id
        return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (ids,)

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the tokenizer where the output head has more rows than that, else None."""
        tokens = len(self.tokenizer)
        return tokens if tokens < int(self.model.config.vocab_size) else None

    @property
    def context_tokens(self) -> int:
        """How many tokens the model can hold, prompt and answer together."""
        return int(self.model.config.max_position_embeddings)


def load_model(text: str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Load a model for decoding: evaluation mode, no gradients, on `device`.

    `dtype` is float32, bfloat16, float16 (or fp32, bf16, fp16), or `auto`: as stored.
    Raises UserError with the reason when the model cannot be loaded.
    """
    reference = parse_reference(text)
    arguments = reference.arguments()
    if reference.gguf:
        _check_gguf(Path(text))
        arguments["quantization_config"] = _dequantized()
    config = read_model_config(text)
    if is_feature_draft(config):
        raise UserError(f"{text}: a feature draft, which is no model without its target; use it as a draft")
    base = None if reference.gguf else adapter_base(reference.location, **arguments)
    if base:
        return _load_merged(text, base, config, dtype, device)
    if not reference.gguf:
        check_files(text, reference.location, **reference.arguments())
    try:
        if getattr(config, SIZE, None) and not reference.gguf:
            wanted = named_dtype(dtype)
            wanted = wanted if isinstance(wanted, torch.dtype) else config.dtype or torch.float32
            model = load_trimmed(reference.location, config, wanted, **arguments)
        else:
            loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = loader.from_pretrained(
                reference.location, dtype=named_dtype(dtype), **weight_arguments(), **arguments
            )
            model = EncoderDecoder(model) if config.is_encoder_decoder else model
    except UserError:
        raise
    except UNLOADABLE as error:
        what = f"{text}: cannot be loaded as a language model ({first_line(error)})"
        raise UserError(what + refusal_advice(error)) from error
    if reference.gguf:
        _forget_quantization(transformers_model(model))
    model = model.to(named_device(device)).eval().requires_grad_(False)
    if not config.is_encoder_decoder:
        use_grouped_attention(model)
    stored_dtype = config.dtype or torch.float32
    return Loaded(model, load_tokenizer(text), text, weights_revision(reference, config), stored_dtype)


def _load_merged(text: str, base: str, config: Any, dtype: str, device: str) -> Loaded:
    """An adapter, merged into its base."""
    reference = parse_reference(text)
    whole = load_model(base, "float32", device)
    wanted = named_dtype(dtype)
    wanted = wanted if isinstance(wanted, torch.dtype) else whole.stored_dtype
    model = merge_adapter(transformers_model(whole.model), reference.location, wanted, **reference.arguments())
    model = EncoderDecoder(model) if config.is_encoder_decoder else model
    block = getattr(config, "draftsmith", None)
    if block is not None:
        model.config.draftsmith = block  # the adapter's own: whose draft it has become
    model = model.eval().requires_grad_(False)
    return Loaded(model, load_tokenizer(text), text, adapter_revision(text), whole.stored_dtype)


def adapter_revision(text: str) -> str:
    """What an adapter and its base are together."""
    reference = parse_reference(text)
    base = adapter_base(reference.location, **reference.arguments())
    own = weights_revision(reference, read_model_config(text))
    return f"{own}+{weights_revision(parse_reference(base), read_model_config(base))}" if base else own


def describe_model(text: str) -> Loaded:
    """A target that runs elsewhere: its tokenizer, config and end tokens, without weights.

    Raises UserError when there is no tokenizer or config.
    """
    reference = parse_reference(text)
    config = read_model_config(text)
    try:
        generation = GenerationConfig.from_pretrained(reference.location, **reference.arguments())
    except UNLOADABLE:
        generation = GenerationConfig.from_model_config(config)
    model = SimpleNamespace(config=config, generation_config=generation)
    stored_dtype = config.dtype or torch.float32
    return Loaded(model, load_tokenizer(text), text, adapter_revision(text), stored_dtype)


def load_tokenizer(text: str) -> Any:
    """The tokenizer that lies with a model. Raises UserError when there is none."""
    reference = parse_reference(text)
    base = _base_if_missing(reference, "tokenizer_config.json")
    if base:
        return load_tokenizer(base)
    try:
        return AutoTokenizer.from_pretrained(reference.location, **code_arguments(), **reference.arguments())
    except UNLOADABLE as error:
        raise UserError(f"{text}: no tokenizer could be loaded ({first_line(error)})") from error


def read_model_config(text: str) -> Any:
    """The transformers config of a model, without its weights.

    Raises UserError when there is none, when it gives no context length, and for an encoder–decoder of another family
    than T5's.
    """
    reference = parse_reference(text)
    base = _base_if_missing(reference, "config.json")
    if base:
        return read_model_config(base)
    try:
        config = AutoConfig.from_pretrained(reference.location, **code_arguments(), **reference.arguments())
    except UNLOADABLE as error:
        known = speculators_config(find_file(reference.location, "config.json", **reference.arguments()), text)
        if known:
            return known
        what = f"{text}: no model config could be read ({first_line(error)})"
        raise UserError(what + refusal_advice(error)) from error
    if config.is_encoder_decoder:
        complete_config(config, text)
    if not hasattr(config, "max_position_embeddings"):
        raise UserError(f"{text}: its config gives no context length (max_position_embeddings), as attention models do")
    return config


def _base_if_missing(reference: Reference, file: str) -> str | None:
    """The base model of an adapter, in a folder or on the Hub, that lacks this file."""
    if reference.gguf or find_file(reference.location, file, **reference.arguments()):
        return None
    return adapter_base(reference.location, **reference.arguments())


def named_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of a name, or 'auto'. Raises UserError for an unknown name."""
    name = SHORT_DTYPES.get(name, name)
    if name != "auto" and name not in DTYPES:
        raise UserError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, name)


def named_device(name: str) -> torch.device:
    """The torch device of a name; 'auto' is the accelerator where there is one. Raises UserError."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r}: expected auto, cpu, cuda or cuda:N") from None
    if device.type != "cpu" and not torch.accelerator.is_available():
        raise UserError(f"device {name!r}: this machine, or this build of torch, has no accelerator; use cpu")
    return device


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits over every token and its id: equal fingerprints mean the same ids."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256("\n".join(f"{i}\t{token}" for token, i in entries).encode()).hexdigest()[:16]


def _dequantized() -> Any:
    from transformers import GgufConfig

    return GgufConfig(dequantize=True)


def _check_gguf(path: Path) -> None:
    """A cut-off download is the usual fault; transformers answers it with a numpy reshape error."""
    from gguf import GGUFReader

    try:
        GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        size_mib = path.stat().st_size / 2**20
        raise UserError(f"{path}: not a whole GGUF file ({size_mib:.1f} MiB on disk); download it again") from error


def _forget_quantization(model: Any) -> None:
    """A de-quantised model is plain floats: leave no trace that would stop save_pretrained or training."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model, "is_quantized"):
        model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def first_line(error: Exception) -> str:
    """The first line of an error's text, else its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
