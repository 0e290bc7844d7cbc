"""A latency profile in a file of its own: measured once on a machine, and frozen for whoever predicts with it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from configs.errors import UserError
from eval.latency import Latency
from eval.stats import Interval


class ShapeCost(BaseModel):
    """A draft of some shape, untrained: its draft step c and the rest of its rounds o, in plain steps; operations of a
    forward of one token."""

    name: str
    draft: dict[str, Any]
    c: float
    c_ci: Interval
    o: float
    weights: int
    flop: int


class TargetFacts(BaseModel):
    """Of the target what a plan needs: operations of a forward of one token, sizes, and its paces on long batches."""

    flop: int
    vocabulary: int
    hidden_size: int
    generated_tokens_per_s: float
    read_tokens_per_s: float


class LatencyProfile(BaseModel):
    """`latency` is of one row, with the draft that was named or else the first of `shapes`.

    `batches` holds the same for more rows at once, and for other shapes their c at that batch ÷ their c alone is taken
    to be that of the first. `settings` and `provenance` say on what it was measured.
    """

    schema_version: Literal[1] = 1
    target: TargetFacts
    latency: Latency
    batches: dict[int, Latency]
    shapes: list[ShapeCost]
    settings: dict[str, Any]
    provenance: dict[str, Any]


def read_profile(path: Path) -> LatencyProfile:
    """Raises UserError for a file that is none."""
    try:
        return LatencyProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: no such profile; `draftsmith profile --target T --out {path}` makes it") from None
    except (ValidationError, UnicodeDecodeError):
        raise UserError(f"{path}: not a latency profile; `draftsmith profile` makes one") from None
