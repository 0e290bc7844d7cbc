"""Weights in fewer bits: a quantised target is a target of its own, with its own law."""

import copy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from configs.errors import UserError
from decode.compiled import uncompiled
from decode.encoder_decoder import transformers_model
from decode.models import Loaded, first_line

Precision = Literal["int8", "int4", "nf4"]


def quantise(model: Any, precision: Precision) -> None:
    """Quantise the weights of every linear layer of `model` in place; its activations and embeddings stay as they are.

    int8 and int4 are torchao's weight-only ones, nf4 is that of bitsandbytes (QLoRA, Dettmers et al. 2023), without the
    layers whose stored dtype the model computes in (T5's `wo`).
    Raises UserError where the library is missing or has no kernel for this device.
    """
    library = "bitsandbytes" if precision == "nf4" else "torchao"
    try:
        _with_bitsandbytes(model) if precision == "nf4" else _with_torchao(model, precision)
    except ModuleNotFoundError as error:
        missing = (error.name or library).partition(".")[0]
        raise UserError(f"{precision}: needs {missing}: pip install {missing}") from None
    except (ImportError, RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        where = next(model.parameters()).device.type
        what = f"{precision}: {library} cannot do it on this {where} ({first_line(error)})"
        raise UserError(f"{what}; try int8") from error
    kept = _kept_whole(model) if precision == "nf4" else set()
    left = [
        name for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not is_packed(part.weight) and name.rpartition(".")[2] not in kept
    ]  # fmt: skip
    if left:
        raise UserError(
            f"{precision}: {library} leaves {left[0]} as it is (its width does not fit its groups); try int8"
        )


def quantised(loaded: Loaded, precision: Precision) -> Loaded:
    """A model with quantised weights, under a revision of its own."""
    quantise(loaded.model, precision)
    return replace(loaded, revision=f"{loaded.revision}+{precision}")


def in_float32(model: Any) -> Any:
    """A copy of a model with the values of its weights, quantised ones too, in plain float32."""
    twin = copy.deepcopy(uncompiled(model))
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and is_packed(child.weight):
                setattr(module, name, _plain(child))
    return twin.float()


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight is stored in fewer bits: torchao's is made of other tensors, bitsandbytes' has a state."""
    return hasattr(weight, "__tensor_flatten__") or getattr(weight, "quant_state", None) is not None


def numbers(weight: torch.Tensor) -> int:
    """How many numbers a weight has, packed or not."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, of the parts of a packed one."""
    if not is_packed(weight):
        return weight.numel() * weight.element_size()
    state = getattr(weight, "quant_state", None)
    if state is not None:
        parts = [
            weight.data,
            *(part for part in state.as_dict(packed=False).values() if isinstance(part, torch.Tensor)),
        ]
        return sum(part.numel() * part.element_size() for part in parts)
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(weight, name)) for name in names)


def _with_torchao(model: Any, precision: Precision) -> None:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig() if precision == "int8" else Int4WeightOnlyConfig())


def _with_bitsandbytes(model: Any) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    kept = _kept_whole(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name not in kept:
                weight = child.weight.detach()
                packed = Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4",
                    device="meta",
                )  # fmt: skip
                packed.weight = Params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
                packed.bias = child.bias
                packed.support_avx512bf16_for_cpu = False  # else its first forward rounds the scales again
                setattr(module, name, packed)


def _kept_whole(model: Any) -> set[str]:
    """Names of layers that transformers never packs for this model: it casts what goes in to their stored dtype."""
    return set(getattr(transformers_model(model), "_keep_in_fp32_modules", None) or ())


def _plain(linear: nn.Linear) -> nn.Linear:
    """A linear layer with the values of a packed one."""
    weight: Any = linear.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        values = dequantize_4bit(weight.data, weight.quant_state)
    else:
        values = weight.dequantize()
    plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(values.float(), requires_grad=False)
    plain.bias = linear.bias
    return plain
