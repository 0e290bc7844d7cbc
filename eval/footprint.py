"""What a draft costs beside time: memory, and arithmetic for each token emitted."""

from typing import Any

from pydantic import BaseModel

from decode.quantise import numbers, stored_bytes
from decode.trace import Tally

GIB = 2**30


class Footprint(BaseModel):
    """GiB of weights, bytes of keys and values for each token of text, and floating-point operations for each emitted
    token: 2 for each weight that a forward multiplies with, attention itself left out."""

    target_gib: float
    draft_gib: float
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    plain_gflop_per_token: float
    speculative_gflop_per_token: float


def footprint(target: Any, draft: Any, tally: Tally, rereads: bool) -> Footprint:
    """Of a target and a draft module, for rounds as counted.

    A draft of its own reads one token for each that it drafts; one that reads the target's features (`rereads`) reads
    what was emitted once more, with the true ones.
    """
    read_by_draft = tally.drafted + (tally.emitted - tally.rounds if rereads else 0)
    verified = tally.drafted + tally.rounds
    flop = verified * flop_per_token(target) + max(0, read_by_draft) * flop_per_token(draft)
    return Footprint(
        target_gib=_gib(target),
        draft_gib=_gib(draft),
        target_kv_bytes_per_token=kv_bytes_per_token(target),
        draft_kv_bytes_per_token=kv_bytes_per_token(draft),
        plain_gflop_per_token=flop_per_token(target) / 1e9,
        speculative_gflop_per_token=flop / max(1, tally.emitted) / 1e9,
    )


def flop_per_token(model: Any) -> int:
    """Of one token's forward: 2 for each weight of a matrix; an embedding that is not the head is only looked up.

    A mixture of experts is counted whole, an encoder not at all.
    """
    weights = getattr(model, "decoding_weights", None) or list(model.parameters())
    matrices = sum(
        numbers(weight) for weight in {id(weight): weight for weight in weights}.values() if weight.ndim >= 2
    )
    embedding, head = _weight(model, "get_input_embeddings"), _weight(model, "get_output_embeddings")
    looked_up = embedding.numel() if embedding is not None and embedding is not head else 0
    return 2 * (matrices - looked_up)


def kv_bytes_per_token(model: Any) -> int:
    """Of all attention layers of a decoder, keys and values, in the model's dtype: of a source's token the cross
    attention's, of an answer's its own."""
    if not list(model.parameters()):
        return 0  # a draft that only looks up
    config = model.config.get_text_config()
    depth = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["attention"] * depth
    layers = sum("attention" in kind for kind in kinds)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = next(weight for weight in model.parameters() if weight.is_floating_point()).element_size()
    return int(2 * layers * heads * width * element)


def _gib(model: Any) -> float:
    return sum(stored_bytes(weight) for weight in model.parameters()) / GIB


def _weight(model: Any, getter: str) -> Any:
    try:
        return getattr(getattr(model, getter)(), "weight", None)
    except (AttributeError, NotImplementedError):  # a feature draft keeps no embeddings
        return None
