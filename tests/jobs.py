"""The whole job in processes of its own, launched as people launch it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LAUNCHES = {
    "1 process": [sys.executable, "-m", "distill"],
    "2 x DDP": [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "distill"],
    "2 x ZeRO-2": [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "configs/accelerate/zero2.yaml"),
                   "-m", "distill"],
}  # fmt: skip
ENVIRONMENTS = {"2 x DDP": {"ACCELERATE_USE_CPU": "true"}}


def environment(launch: str = "1 process") -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "OMP_"))}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ENVIRONMENTS.get(launch, {})


def run(arguments: list[str], launch: str = "1 process") -> subprocess.CompletedProcess[str]:
    command = [*LAUNCHES[launch], *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(launch), timeout=300)


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
