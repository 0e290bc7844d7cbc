"""Accelerate and DeepSpeed enter here, and in checkpoint.py, and nowhere else."""

import os
from typing import Any

import torch

from configs.errors import UserError


def start_accelerator(
    micro_batches: int, clip_norm: float, seed: int, tracker: str | None = None, mixed_precision: str | None = None
) -> Any:
    """An Accelerator for the launch we are in: one process, DDP, or DeepSpeed ZeRO-1/2.

    `micro_batches` backward passes make one optimiser step; gradients are clipped to `clip_norm`;
    `seed` sets the global random state (dropout, if the draft has any). `mixed_precision` None is the launcher's.
    Raises UserError for a launch that would silently train in another way than it says.
    """
    wants_deepspeed = _flag("ACCELERATE_USE_DEEPSPEED")
    if _flag("ACCELERATE_USE_FSDP"):
        raise UserError("FSDP launches are not supported; use DDP or configs/accelerate/zero2.yaml")
    handlers = _prepare_deepspeed_on_cpu() if wants_deepspeed and not torch.accelerator.is_available() else []

    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(kwargs_handlers=handlers, log_with=tracker, mixed_precision=mixed_precision)
    _check_launch(accelerator, wants_deepspeed)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(_threads_of_a_process())
    set_seed(seed)
    accelerator.gradient_accumulation_steps = micro_batches
    if wants_deepspeed:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_accumulation_steps"] = micro_batches
        settings["gradient_clipping"] = clip_norm
        settings["train_micro_batch_size_per_gpu"] = 1  # only DeepSpeed's own throughput log reads it
        settings["steps_per_print"] = 10**9
    return accelerator


def launch_name(accelerator: Any) -> str:
    """How this run is parallel, e.g. 'DEEPSPEED zero-2 x 2' or 'MULTI_CPU x 2'."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        stage = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
        kind = f"DEEPSPEED zero-{stage}"
    return f"{kind} x {accelerator.num_processes}"


def _threads_of_a_process() -> int:
    """accelerate gives a process one thread where nobody asked for more; share the cores out instead."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def _prepare_deepspeed_on_cpu() -> list[Any]:
    """Without the gloo handler accelerate sees one process; without the second line DeepSpeed compiles an op."""
    try:
        import deepspeed
    except ImportError:
        raise UserError("this launch needs DeepSpeed; install it with: pip install 'draftsmith[deepspeed]'") from None
    from accelerate.utils import InitProcessGroupKwargs

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return [InitProcessGroupKwargs(backend="gloo")]


def _check_launch(accelerator: Any, wants_deepspeed: bool) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"the launcher started {launched} processes but accelerate sees {accelerator.num_processes}: "
            "each would train alone. On CPU set ACCELERATE_USE_CPU=true and launch with --multi_gpu"
        )
    if wants_deepspeed and accelerator.distributed_type.value != "DEEPSPEED":
        raise UserError(
            f"a DeepSpeed launch fell back to {accelerator.distributed_type.value}: unset ACCELERATE_USE_CPU "
            "(and drop --cpu); DeepSpeed finds the CPU by itself"
        )
    if wants_deepspeed and accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise UserError("ZeRO-3 is not supported; use configs/accelerate/zero2.yaml")
