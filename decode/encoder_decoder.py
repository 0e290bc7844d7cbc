"""Encoder–decoder models (T5 and its kin) read as causal ones.

A text is the source's ids, its end token included, and then the answer's. The encoder reads the source once; the
decoder begins with its start token where the source ends. So the logits at the source's last token are those of the
answer's first one, as in a causal model, and the rest of the package need not tell the two apart.

Shapes: B texts, S tokens of a source, T tokens of source and answer together, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutput

from configs.errors import UserError
from decode.kv import cache_argument

FAMILIES = ("t5", "mt5", "umt5")
TRAINED_TOKENS = 512  # of a source, and of an answer, where the config has no n_positions


def complete_config(config: Any, name: str) -> None:
    """Give the config of an encoder–decoder model a context length, which relative positions leave open: source and
    answer together have twice n_positions tokens. Raises UserError for another family than `FAMILIES`."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{name}: an encoder–decoder model of type {config.model_type}; of these {', '.join(FAMILIES)} can be used"
        )
    config.max_position_embeddings = 2 * int(getattr(config, "n_positions", None) or TRAINED_TOKENS)


def source_end(config: Any) -> int:
    """The id that ends a source."""
    ends = config.eos_token_id
    return int(ends[0] if isinstance(ends, list) else ends)


class EncoderDecoder(nn.Module):
    """A model of `FAMILIES` that is called like a causal LM, over source and answer as one text.

    The source ends with the first end token of a text. Logits and hidden states at places before that are zeros: no
    law is asked for there. Raises UserError where a text without a cache has no end token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        complete_config(self.config, type(model).__name__)
        starts = model.generation_config.decoder_start_token_id
        self.source_end = source_end(model.config)
        self.start = int(model.config.pad_token_id if starts is None else starts)
        scales = getattr(self.config, "scale_decoder_outputs", self.config.model_type == "umt5")  # umt5 had no such key
        self._scale = self.config.d_model**-0.5 if scales else 1.0
        self._cache_name = cache_argument(model.decoder)

    def forward(
        self, input_ids: Tensor, cache: "SourceCache | None" = None, logits_to_keep: int | Tensor = 0,
        use_cache: bool = False, output_hidden_states: bool = False,
    ) -> Any:  # fmt: skip
        """`logits` [B, kept, V] for ids [B, T]. With a `cache` all texts have sources of one length."""
        assert not output_hidden_states, "no draft reads the hidden states of an encoder–decoder target"
        hidden = self.body(input_ids).last_hidden_state if cache is None else self._go_on(input_ids, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self.model.lm_head(hidden[:, kept]))

    def body(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:  # fmt: skip
        """`last_hidden_state` [B, T, D] of ids [B, T], texts of any source length padded to the right."""
        if position_ids is not None:
            raise UserError("sources of several rows cannot share a sequence; leave data.pack out")
        is_end = input_ids == self.source_end
        if not bool(is_end.any(dim=1).all()):
            raise UserError(_no_end(self.source_end))
        lengths = [int(end) + 1 for end in is_end.int().argmax(dim=1)]
        sources = [row[:length] for row, length in zip(input_ids, lengths, strict=True)]
        answers = [self._answer(row[length:]) for row, length in zip(input_ids, lengths, strict=True)]
        mask = None
        if len(set(lengths)) > 1:
            mask = pad_sequence([torch.ones_like(source) for source in sources], batch_first=True)
        encoded = self.model.encoder(input_ids=pad_sequence(sources, batch_first=True), attention_mask=mask)
        decoded = self._decode(pad_sequence(answers, batch_first=True), encoded.last_hidden_state, mask)
        hidden = [
            nn.functional.pad(row[: len(answer)], (0, 0, length - 1, 0))
            for row, answer, length in zip(decoded, answers, lengths, strict=True)
        ]
        return BaseModelOutput(last_hidden_state=torch.stack(hidden))

    def empty_cache(self) -> "SourceCache":
        """What `forward` takes for a new text."""
        return SourceCache(self.model.decoder.config)

    def get_decoder(self) -> Any:
        """What gives hidden states without the head, as of a causal LM."""
        return self.body

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def gradient_checkpointing_enable(self, **arguments: Any) -> None:
        self.model.gradient_checkpointing_enable(**arguments)

    @property
    def generation_config(self) -> Any:
        return self.model.generation_config

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def decoding_weights(self) -> list[nn.Parameter]:
        """Those that every token of an answer passes through; what reads the source does so once."""
        of_source = ("EncDecAttention.k.weight", "EncDecAttention.v.weight")
        decoder = [weight for name, weight in self.model.decoder.named_parameters() if not name.endswith(of_source)]
        return [*decoder, *self.model.lm_head.parameters()]

    @property
    def layers(self) -> nn.ModuleList:
        """Those of encoder and decoder."""
        return nn.ModuleList([*self.model.encoder.block, *self.model.decoder.block])

    def _go_on(self, ids: Tensor, cache: "SourceCache") -> Tensor:
        """Hidden states [B, T, D] of the next tokens."""
        answer = ids
        if cache.encoded is None:
            source = ids if cache.source is None else torch.cat([cache.source, ids], dim=1)
            is_end = (source == self.source_end).all(dim=0)
            if not bool(is_end.any()):
                cache.source = source
                return torch.zeros(*ids.shape, self.config.d_model, dtype=self.dtype, device=ids.device)
            length = int(is_end.int().argmax()) + 1
            cache.encoded = self.model.encoder(input_ids=source[:, :length]).last_hidden_state
            answer = torch.stack([self._answer(row) for row in source[:, length:]])
        decoded = self._decode(answer, cache.encoded, None, cache.decoded)
        return nn.functional.pad(decoded, (0, 0, ids.shape[1] - decoded.shape[1], 0))

    def _answer(self, ids: Tensor) -> Tensor:
        """What the decoder reads of an answer [n]: its start token first."""
        return torch.cat([ids.new_full((1,), self.start), ids])

    def _decode(
        self, ids: Tensor, encoded: Tensor, mask: Tensor | None, cache: EncoderDecoderCache | None = None
    ) -> Tensor:
        output = self.model.decoder(
            input_ids=ids, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=cache is not None,
            **{self._cache_name: cache},
        )  # fmt: skip
        hidden: Tensor = output.last_hidden_state * self._scale
        return hidden


class SourceCache:
    """Of one text, or several with sources of one length: what of the source has come, its encoding [B, S, D] once it
    is whole, and the decoder's keys and values."""

    is_croppable = True

    def __init__(self, config: Any) -> None:
        self.source: Tensor | None = None
        self.encoded: Tensor | None = None
        self.decoded = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    @property
    def layers(self) -> list[CacheLayerMixin]:
        """The decoder's self-attention."""
        found: list[CacheLayerMixin] = self.decoded.self_attention_cache.layers
        return found

    def crop(self, tokens: int) -> None:
        """Forget the last -`tokens` tokens of the answer."""
        if tokens:
            assert -tokens < self.decoded.get_seq_length(), "a source is never taken back"
            self.decoded.crop(tokens)


def transformers_model(model: Any) -> Any:
    """The model as transformers has it."""
    return model.model if isinstance(model, EncoderDecoder) else model


def check_source(model: Any, prompt: Sequence[int]) -> None:
    """Raises UserError for a prompt that an encoder–decoder model cannot take for a source."""
    if isinstance(model, EncoderDecoder) and model.source_end not in prompt:
        raise UserError(_no_end(model.source_end))


def _no_end(token: int) -> str:
    return f"a source for the encoder ends with the end token (id {token}), and this one has none"
