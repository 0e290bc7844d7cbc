"""What an artefact was made with: versions, machine, git revision."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")


def provenance() -> dict[str, Any]:
    """Versions, processor, cores and the git revision of this code ('-dirty' with local changes)."""
    return {
        "git": git_revision(),
        "versions": {"draftsmith": _version("draftsmith"), "python": platform.python_version()}
        | {name: _version(name) for name in LIBRARIES},
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def git_revision() -> str:
    """The commit of the checkout this code lies in, or 'unknown' outside one."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
