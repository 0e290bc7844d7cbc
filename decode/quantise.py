"""Weights in fewer bits (torchao, weight-only): a quantised target is a target of its own, with its own law."""

import copy
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from configs.errors import UserError
from decode.compiled import uncompiled
from decode.models import Loaded, first_line

Precision = Literal["int8", "int4"]


def quantise(model: Any, precision: Precision) -> None:
    """Quantise the weights of every linear layer of `model` in place; its activations and embeddings stay as they are.

    Raises UserError where torchao is missing or has no kernel for this device.
    """
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise UserError(f"{precision}: needs torchao: pip install torchao") from None
    config = Int8WeightOnlyConfig() if precision == "int8" else Int4WeightOnlyConfig()
    try:
        quantize_(model, config)
    except (ImportError, RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        where = next(model.parameters()).device.type
        raise UserError(f"{precision}: torchao cannot do it on this {where} ({first_line(error)}); try int8") from error
    left = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and not is_packed(part.weight)]
    if left:
        raise UserError(f"{precision}: torchao leaves {left[0]} as it is (its width does not fit its groups); try int8")


def quantised(loaded: Loaded, precision: Precision) -> Loaded:
    """A model with quantised weights, under a revision of its own."""
    quantise(loaded.model, precision)
    return replace(loaded, revision=f"{loaded.revision}+{precision}")


def in_float32(model: Any) -> Any:
    """A copy of a model with the values of its weights, quantised ones too, in plain float32."""
    twin = copy.deepcopy(uncompiled(model))
    for module in twin.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if is_packed(weight):
                plain = nn.Parameter(weight.dequantize().float(), requires_grad=False)
                setattr(module, name, plain)
    return twin.float()


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight is made of other tensors, as torchao's are."""
    return hasattr(weight, "__tensor_flatten__")


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, of the parts of a packed one."""
    if not is_packed(weight):
        return weight.numel() * weight.element_size()
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(weight, name)) for name in names)
