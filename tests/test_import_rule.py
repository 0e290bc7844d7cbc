"""A package may import only packages below it, and each framework enters in one place."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["configs", "decode", "eval", "train", "distill"]  # each may import those to its left
METRICS = {f"eval/metrics/{name}/{name}.py" for name in ("acceptance", "accepted_length", "speedup")}
HOMES = {
    "accelerate": {"train/parallel.py", "train/launching.py"},
    "deepspeed": {"train/parallel.py"},
    "torchao": {"decode/quantise.py"},
    "bitsandbytes": {"decode/quantise.py"},
    "peft": {"decode/adapters.py", "train/lora.py"},
    "wandb": {"train/tracking.py"},
    "huggingface_hub": {"decode/models.py"}
    | {f"train/publish/{name}.py" for name in ("access", "card", "card_metadata", "fetch", "hub")},
    "datasets": {"eval/sources.py", *METRICS},  # a metric names its columns' types with it
    "evaluate": METRICS,
    "openai": {"distill/engine.py"},
    "pyarrow": {"configs/records.py"},
    "matplotlib": {"eval/plots.py"},
    "jinja2": {"eval/page.py", "decode/chat.py"},  # in chat: what a template may raise
    "markdown_it": {"eval/page.py"},
}
FILES = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_imports_only_packages_below_it(path):
    package = path.relative_to(ROOT).parts[0]
    above = set(ORDER[ORDER.index(package) + 1 :])
    assert not imported_packages(path) & above


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_framework_enters_only_in_its_own_room(path):
    name = str(path.relative_to(ROOT))
    strangers = {framework for framework, homes in HOMES.items() if name not in homes}
    assert not imported_packages(path) & strangers


def test_no_two_files_share_a_name():
    names = [path.name for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert len(names) == len(set(names))


def test_entry_points_are_short():
    assert all(len(path.read_text().splitlines()) <= 40 for path in FILES if path.name == "__main__.py")
