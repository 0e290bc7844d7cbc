"""Starting several processes of ourselves through accelerate, with the launch configurations that are shipped."""

import importlib.util
import logging
import os
from pathlib import Path
from typing import Literal

from configs.errors import UserError

SHUTDOWN_S = 600  # for processes that were asked to stop: they end their step or measurement, and save
LaunchName = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"]


def launch(name: LaunchName, num_processes: int | None, module: str, arguments: list[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` in `num_processes` processes of this machine, and return their exit code.

    None: one process for each accelerator, and as many as the configuration says on a CPU. Raises UserError inside a
    launcher, whose processes must not launch more.
    """
    if {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        raise UserError("--launch starts accelerate itself; leave it out under `accelerate launch` or torchrun")
    if name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"--launch {name} needs DeepSpeed; install it with: pip install 'draftsmith[deepspeed]'")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))

    import torch
    import yaml

    import configs

    # This file's neighbour, so that an installed package finds it too.
    config = Path(configs.__file__).parent / "accelerate" / f"{name}.yaml"
    if num_processes is None:
        said = yaml.safe_load(config.read_text(encoding="utf-8"))["num_processes"]
        num_processes = torch.accelerator.device_count() or int(said)
    if name == "ddp" and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes speak for themselves
    options = ["--config_file", str(config), "--num_processes", str(num_processes), "-m", module, *arguments]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        return code if code >= 0 else 128 - code  # ended by a signal
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
