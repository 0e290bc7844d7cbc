"""Training a few added weights of a draft instead of its own (LoRA, Hu et al. 2022), through peft."""

from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file

from configs.settings import StrictSettings


class LoraSettings(StrictSettings):
    """Low-rank additions to the matrices of the draft's layers; its embeddings and head stay as they are."""

    rank: int = Field(0, ge=0, description="Rank of what is added to each matrix; 0 trains the draft itself.")
    alpha: float = Field(16.0, gt=0, description="What is added is scaled by alpha ÷ rank.")

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        if not self.rank and self.alpha != type(self).model_fields["alpha"].default:
            raise ValueError("draft.lora.alpha has no effect without draft.lora.rank")
        return self


def add_lora(model: Any, settings: LoraSettings, base: str, seed: int) -> None:
    """Freeze `model` and add trainable weights, which only `seed` decides, in place. `base` is where the model lies."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules="all-linear", base_model_name_or_path=base
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        get_peft_model(model, config)


def has_lora(model: Any) -> bool:
    """Whether `add_lora` was here."""
    return hasattr(model, "peft_config")


def save_lora(model: Any, folder: Path) -> None:
    """Write the added weights alone, as an adapter folder that peft reads."""
    from peft import get_peft_model_state_dict

    # As peft names them: `model` stands inside its wrapper there.
    state = {
        f"base_model.model.{name}": weight.detach().cpu().contiguous()
        for name, weight in get_peft_model_state_dict(model).items()
    }
    save_file(state, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    (config,) = model.peft_config.values()
    config.inference_mode = True
    config.save_pretrained(str(folder))
