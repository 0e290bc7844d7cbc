"""transformers' own `generate` under one of our laws: the second opinion, and the batched sampler of answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from decode.encoder_decoder import EncoderDecoder, transformers_model
from decode.kv import cache_argument
from decode.laws import Law


@torch.no_grad()
def hf_generate(
    model: Any, prompts: Sequence[Sequence[int]], law: Law, max_new_tokens: int, eos_ids: Sequence[int], seed: int,
    whole_law: bool = False, **extra: Any,
) -> list[list[int]]:  # fmt: skip
    """Continue each prompt under `law`; an answer keeps its end token, and ends there or at `max_new_tokens`.

    What the model's own generation config asks for (penalties, top-k, ...) is set aside for the call, so that the
    law is ours alone, and torch's global random state is put back. A law with processors is given whole, as one
    processor: transformers would put them behind temperature and filters. `whole_law` asks for that for any law: where
    top-p counts it is faster, since transformers sorts the whole vocabulary.
    """
    longest = max(len(prompt) for prompt in prompts)
    pad = eos_ids[0] if eos_ids else 0
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    how: dict[str, Any] = {"do_sample": False}
    has_encoder, begun = isinstance(model, EncoderDecoder), longest
    if has_encoder:
        extra["decoder_start_token_id"], begun = model.start, 1
        cache, model = model.empty_cache().decoded, transformers_model(model)
        extra[cache_argument(model)] = cache  # transformers makes one with as many layers as the encoder has
    whole_law = whole_law or bool(law.processors)
    if whole_law:
        how = {"do_sample": not law.is_greedy, "top_k": 0}
        source = ids if has_encoder else None
        extra["logits_processor"] = [_WholeLaw(law, source), *extra.get("logits_processor", [])]
    elif not law.is_greedy:
        how = {"do_sample": True, "temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
        how["min_p"] = law.min_p or None
    if law.vocabulary is not None and not whole_law:
        how["suppress_tokens"] = list(range(law.vocabulary, model.config.vocab_size)) or None
    ends: dict[str, Any] = {"eos_token_id": list(eos_ids) or None, "pad_token_id": pad}
    with _blank_generation_config(model), _own_randomness(seed, model.device):
        output: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **ends, **how, **extra)
    return [_until_end(row, eos_ids) for row in output[:, begun:].tolist()]


class _WholeLaw(LogitsProcessor):  # type: ignore[misc]
    """Logits whose softmax is the law. Behind an encoder the ids begin with a start token instead of the `source`."""

    def __init__(self, law: Law, source: Tensor | None = None) -> None:
        self.law, self.source = law, source

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.source is not None:
            input_ids = torch.cat([self.source, input_ids[:, 1:]], dim=1)
        return self.law(scores.unsqueeze(1), input_ids)[:, 0].log()


@contextmanager
def _blank_generation_config(model: Any) -> Iterator[None]:
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """transformers draws from torch's global state: seed it, and put it back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _until_end(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in eos_ids), ids)
