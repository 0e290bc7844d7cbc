"""What becomes of a row that cannot be used: the run stops at it, or it is left out and counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from configs.errors import UserError


@dataclass
class BadRows:
    """Collects what is wrong with rows. `error` stops at the first one; `skip` counts by reason and goes on.

    `notes` are about rows that are used all the same.
    """

    policy: Literal["error", "skip"] = "error"
    reasons: Counter[str] = field(default_factory=Counter)
    first_at: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def refuse(self, where: str, reason: str) -> None:
        """`where` is FILE:LINE. Raises UserError naming both, unless rows are skipped."""
        if self.policy == "error":
            raise UserError(f"{where}: {reason}")
        self.reasons[reason] += 1
        self.first_at.setdefault(reason, where)

    @property
    def skipped(self) -> int:
        return self.reasons.total()

    def lines(self) -> list[str]:
        """For people: each reason with its count and the first place, then the notes."""
        reasons = self.reasons.items()
        told = [f"skipped {count} × {reason} (first: {self.first_at[reason]})" for reason, count in reasons]
        return told + [f"{count} × {note}" for note, count in self.notes.items()]
