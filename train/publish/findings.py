"""What is wrong with a draft folder, one finding at a time, and the folder as the checks see it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """`what` is there, `why` it matters, how to `mend` it; a note is nothing that an engine would stumble over.

    `engine` names the only one that stumbles, where it is one: for another it is a note.
    """

    what: str
    why: str
    mend: str
    engine: str | None = None
    is_fault: bool = True

    def judged_for(self, engines: Collection[str]) -> "Finding":
        """The same as it counts for these engines."""
        return self if self.engine is None or self.engine in engines else replace(self, is_fault=False)

    def line(self) -> str:
        return f"{'fault' if self.is_fault else 'note'}: {self.what}. {self.why}. To mend: {self.mend}"


def note(what: str, why: str, mend: str) -> Finding:
    """A finding that is no fault."""
    return Finding(what, why, mend, is_fault=False)


@dataclass(frozen=True)
class Header:
    """Of a stored tensor: shape and dtype, as safetensors names it (F32, BF16, I64, BOOL)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype in ("F64", "F32", "F16", "BF16")  # not the packed ones of quantised weights


@dataclass(frozen=True)
class DraftFolder:
    """A folder whose config.json and weights could be read. `files` holds each tensor's file."""

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, Path] = field(repr=False)

    @cached_property
    def headers(self) -> dict[str, Header]:
        found = {}
        for file in sorted(set(self.files.values())):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    part = opened.get_slice(name)
                    found[name] = Header(tuple(part.get_shape()), str(part.get_dtype()))
        return found

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A part of config.json; empty where it is none."""
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}

    @property
    def block(self) -> Mapping[str, Any]:
        """What our own training wrote into config.json; empty in somebody else's draft."""
        return self.mapping("draftsmith")


def compare_tensors(found: Mapping[str, Header], expected: Mapping[str, tuple[int, ...]], mend: str) -> list[Finding]:
    """Names that lack, that nobody reads, and that have another shape than the config says."""
    findings = []
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        findings.append(Finding(f"missing tensors: {_some(missing)}", "The engine stops, or goes on with noise", mend))
    if extra:
        findings.append(
            Finding(f"tensors that nothing reads: {_some(extra)}", "vLLM stops at them, SGLang skips them", mend)
        )
    for name in sorted(expected.keys() & found.keys()):
        if found[name].shape != expected[name]:
            findings.append(
                Finding(
                    f"{name} is {list(found[name].shape)}, and config.json makes it {list(expected[name])}",
                    "Weights and config are of two different drafts",
                    mend,
                )
            )
    return findings


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
