"""The whole job in processes of its own, launched as people launch it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ACCELERATE = [str(BIN / "accelerate"), "launch", "--config_file"]
LAUNCHES = {
    "1 process": [sys.executable, "-m", "distill"],
    "2 x DDP": [*ACCELERATE, str(ROOT / "configs/accelerate/ddp.yaml"), "-m", "distill"],
    "2 x ZeRO-1": [*ACCELERATE, str(ROOT / "configs/accelerate/zero1.yaml"), "-m", "distill"],
    "2 x ZeRO-2": [*ACCELERATE, str(ROOT / "configs/accelerate/zero2.yaml"), "-m", "distill"],
    "2 x ZeRO-3": [*ACCELERATE, str(ROOT / "configs/accelerate/zero3.yaml"), "-m", "distill"],
    "2 x ZeRO-3, offloaded": [*ACCELERATE, str(ROOT / "configs/accelerate/zero3_offload.yaml"), "-m", "distill"],
    # FSDP2 needs GPUs; this makes accelerate believe that there are some.
    "2 x FSDP2": [*ACCELERATE, str(ROOT / "configs/accelerate/fsdp2.yaml"), str(ROOT / "tests/fsdp2_on_cpu.py")],
}
ENVIRONMENTS = {"2 x DDP": {"ACCELERATE_USE_CPU": "true"}, "2 x FSDP2": {"ACCELERATE_TORCH_DEVICE": "cpu"}}


def environment(launch: str = "1 process") -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "OMP_"))}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ENVIRONMENTS.get(launch, {})


def run(arguments: list[str], launch: str = "1 process") -> subprocess.CompletedProcess[str]:
    command = [*LAUNCHES[launch], *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(launch), timeout=300)


def run_here(arguments: list[str]) -> Path:
    """The same job in this process: much faster, for what does not depend on being launched."""
    from accelerate.state import AcceleratorState, GradientState

    from configs.reader import read_config
    from distill.job import run as run_job
    from distill.job_settings import JobSettings

    threads = torch.get_num_threads()
    try:
        return run_job(read_config(JobSettings, None, arguments))
    finally:
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output) if "loss" in row]


def run_decode(target: Path, draft: Path | None = None) -> dict:
    command = [
        sys.executable,
        "-m",
        "decode",
        "--target",
        target,
        "--prompt",
        "Who?",
        "--json",
        "--max-new-tokens",
        "20",
    ]
    command += ["--draft", draft] if draft else []
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
