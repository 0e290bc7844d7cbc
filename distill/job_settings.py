"""Everything that decides a distillation run."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from configs.settings import StrictSettings
from distill.answers import DataSettings
from distill.logit_cache import CacheSettings
from distill.on_policy import OnPolicySettings
from distill.shape import DraftSettings
from train.loop import TrainSettings


class ObjectiveSettings(StrictSettings):
    """What the draft minimises."""

    name: Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_alpha", "hybrid"] = (
        Field("forward_kl", description="hybrid is λ·forward_kl + (1-λ)·total_variation, λ = exp(-eta·mean α).")
    )
    beta: float = Field(0.5, ge=0, le=1, description="Of jensen_shannon: 0 is forward_kl, 1 is reverse_kl.")
    eta: float = Field(3.0, ge=0, description="Of hybrid: how fast λ falls with α; 0 is forward_kl.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of an unrolled step ÷ that of the step before.")

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        for option, of in (("beta", "jensen_shannon"), ("eta", "hybrid")):
            if self.name != of and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"objective.{option} has no effect on {self.name}, only on {of}")
        return self


class JobSettings(StrictSettings):
    """Everything that decides a distillation run."""

    target: str = Field(description="Target: a folder, a Hub id[@revision] or a GGUF file.")
    output: Path = Field(Path("runs/distill"), description="Folder of the run; the draft ends in OUTPUT/draft.")
    seed: int = Field(
        0, ge=0, description="Of the sampled answers, of the draft's random weights and of the row order."
    )
    objective: ObjectiveSettings = ObjectiveSettings()
    chunk_tokens: int = Field(128, ge=1, description="Supervised positions whose logits exist at a time.")
    teacher_dtype: str = Field(
        "float32", description="Dtype the target teaches in; bfloat16 is twice as fast where the CPU or GPU has it."
    )
    teacher: Literal["replicated", "sharded"] = Field(
        "replicated",
        description="The frozen target whole on every process, or its layers shared out over them to save memory.",
    )
    latency_profile: Path | None = Field(
        None,
        description="A profile.json or report.json of this machine: the speed-up that it predicts is the score.",
    )
    measure_num_draft_tokens: int = Field(3, ge=1, description="γ of the in-training acceptance measurement.")
    push_to: str | None = Field(
        None,
        description="NAME/REPO on the Hub: the right to write is checked at the start, the draft pushed at the end.",
    )
    push_private: bool = Field(False, description="Make that repository private.")
    data: DataSettings = DataSettings()
    cache: CacheSettings = CacheSettings()
    on_policy: OnPolicySettings = OnPolicySettings()
    draft: DraftSettings = DraftSettings()
    train: TrainSettings = TrainSettings()

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        rollouts = self.on_policy
        if self.push_private and not self.push_to:
            raise ValueError("push_private has no effect without push_to")
        if self.push_to and self.draft.lora.rank:
            raise ValueError("push_to: what draft.lora trains is an adapter; merge it (draftsmith merge) and push that")
        unrolls = self.draft.kind == "eagle3" and self.draft.unroll_steps > 1
        if not unrolls and self.objective.step_decay != ObjectiveSettings().step_decay:
            raise ValueError("objective.step_decay has no effect on a draft that is not unrolled over several steps")
        if rollouts.fraction and self.draft.kind == "eagle3" and rollouts.by == "draft":
            raise ValueError("on_policy.by=draft: a feature draft cannot write without its target; use pair")
        if rollouts.fraction and (self.cache.folder or self.data.pack):
            raise ValueError("on_policy.fraction rolls out new text, which neither a cache nor packed rows hold")
        if rollouts.error_weight != 1 and (rollouts.by == "draft" or not rollouts.fraction):
            raise ValueError("on_policy.error_weight has no effect but with on_policy.by=pair and a fraction")
        return self
