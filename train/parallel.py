"""Accelerate, DeepSpeed and FSDP enter here, and in checkpoint.py and launching.py, and nowhere else."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.errors import UserError


def start_accelerator(
    micro_batches: int, clip_norm: float, seed: int, mixed_precision: str | None, tracker: str | None,
    tracker_folder: Path,
) -> Any:  # fmt: skip
    """An Accelerator for the launch we are in: one process, DDP, FSDP2, or DeepSpeed ZeRO-1/2/3.

    `micro_batches` backward passes make one optimiser step; gradients are clipped to `clip_norm`;
    `seed` sets the global random state (dropout, if the draft has any). `mixed_precision` None is the launcher's.
    A tracker that writes files has them in `tracker_folder`.
    Raises UserError for a launch that would silently train in another way than it says.
    """
    wants_deepspeed, wants_fsdp = _flag("ACCELERATE_USE_DEEPSPEED"), _flag("ACCELERATE_USE_FSDP")
    has_accelerator = torch.accelerator.is_available()
    if mixed_precision == "fp16" and not has_accelerator:
        raise UserError("train.mixed_precision=fp16 needs an accelerator; on a CPU use bf16 or no")
    handlers = _prepare_deepspeed_on_cpu() if wants_deepspeed and not has_accelerator else []

    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    accelerator = Accelerator(
        kwargs_handlers=handlers, mixed_precision=mixed_precision, log_with=tracker,
        project_config=ProjectConfiguration(logging_dir=str(tracker_folder)),
    )  # fmt: skip
    _check_launch(accelerator, wants_deepspeed, wants_fsdp)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(_threads_of_a_process())
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    set_seed(seed)
    accelerator.gradient_accumulation_steps = micro_batches
    if wants_fsdp:  # weights stay float32, and autocast makes the products half: as everywhere else
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if wants_deepspeed:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_accumulation_steps"] = micro_batches
        settings["gradient_clipping"] = clip_norm
        settings["train_micro_batch_size_per_gpu"] = 1  # only DeepSpeed's own throughput log reads it
        settings["steps_per_print"] = 10**9
        if not has_accelerator:  # else offloading has DeepSpeed compile an optimiser of its own
            settings["zero_force_ds_cpu_optimizer"] = False
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # else ZeRO-3 cuts up whatever is loaded from now on; only the draft is to be
    return accelerator


def launch_name(accelerator: Any) -> str:
    """How this run is parallel, e.g. 'DEEPSPEED zero-2 x 2' or 'MULTI_CPU x 2'."""
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        kind = f"DEEPSPEED zero-{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind == "FSDP":
        kind = "FSDP2"
    return f"{kind} x {accelerator.num_processes}"


def shards_weights(accelerator: Any) -> bool:
    """Whether a prepared module's weights are whole in no process: ZeRO-3 or FSDP2."""
    kind = accelerator.distributed_type.value
    return kind == "FSDP" or (kind == "DEEPSPEED" and accelerator.state.deepspeed_plugin.zero_stage == 3)


@torch.no_grad()
def gather_weights(sharded: nn.Module, whole: nn.Module) -> None:
    """Copy the weights of a module that is sharded into one of the same shape that is not.

    Every process must call this, and each ends with all of them.
    """
    for shard, weight in zip(sharded.parameters(), whole.parameters(), strict=True):
        weight.copy_(_whole(shard))


def shard_frozen(layers: nn.ModuleList, device: str) -> None:
    """Share the weights of a frozen model's layers out over all processes' devices; a layer is whole while it runs.

    Embeddings, last norm and head stay on every process: they are read outside a forward pass, and never change.
    From then on every forward pass is one of all processes together (see `Lockstep`).
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


class Lockstep:
    """Lets processes run a sharded model for different numbers of passes without waiting for each other for ever.

    Each pass begins with a count of who is still at work. Who has finished takes empty passes until nobody is.
    """

    def __init__(self, model: nn.Module, accelerator: Any, empty_pass: Any) -> None:
        self._accelerator, self._empty_pass, self._idle = accelerator, empty_pass, False
        model.register_forward_pre_hook(self._before_a_pass)

    def finish(self) -> None:
        """Every process calls this when it is done, and returns when all are."""
        self._idle = True
        while self._at_work(False):
            self._empty_pass()
        self._idle = False

    def _before_a_pass(self, *_: Any) -> None:
        if not self._idle:
            self._at_work(True)

    def _at_work(self, busy: bool) -> bool:
        mine = torch.tensor(float(busy), device=self._accelerator.device)
        return bool(self._accelerator.reduce(mine, reduction="sum") > 0)


def _whole(weight: Any) -> torch.Tensor:
    if hasattr(weight, "full_tensor"):  # FSDP2
        return weight.full_tensor()
    if hasattr(weight, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            return weight.data.clone()
    return weight


def _threads_of_a_process() -> int:
    """OMP_NUM_THREADS, but under a launcher, which sets it to 1 where nobody asked: then a share of the cores."""
    if "WORLD_SIZE" not in os.environ and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
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


def _check_launch(accelerator: Any, wants_deepspeed: bool, wants_fsdp: bool) -> None:
    kind = accelerator.distributed_type.value
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        # How accelerate's launcher of one process is told apart when it was asked for more.
        raise UserError(
            "accelerate was asked for several processes and started one, as it does with --cpu; on a CPU launch with "
            "ACCELERATE_USE_CPU=true and --multi_gpu, or with `draftsmith distill --launch ddp`"
        )
    if wants_fsdp and kind != "FSDP":
        raise UserError(
            f"an FSDP launch fell back to {kind}: its processes would not train together. FSDP needs GPUs; "
            "on a CPU launch with configs/accelerate/zero3.yaml"
        )
    if wants_fsdp and not accelerator.is_fsdp2:
        raise UserError("FSDP 1 is not supported; set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does")
    if accelerator.num_processes != launched:
        raise UserError(
            f"the launcher started {launched} processes but accelerate sees {accelerator.num_processes}: "
            "each would train alone. On CPU set ACCELERATE_USE_CPU=true and launch with --multi_gpu"
        )
    if wants_deepspeed and kind != "DEEPSPEED":
        raise UserError(
            f"a DeepSpeed launch fell back to {kind}: unset ACCELERATE_USE_CPU "
            "(and drop --cpu); DeepSpeed finds the CPU by itself"
        )
