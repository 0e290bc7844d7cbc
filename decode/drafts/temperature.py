"""The temperature at which a draft is best right for each temperature of the target, as its training found it."""

from collections.abc import Mapping
from typing import Any

FITTED = "temperatures"  # in the `draftsmith` block of a draft's config.json: target's -> draft's


def fitted_temperatures(config: Any) -> dict[float, float]:
    """What a draft's transformers config says; empty where nothing was fitted."""
    fitted = (getattr(config, "draftsmith", None) or {}).get(FITTED) or {}
    return {float(target): float(draft) for target, draft in fitted.items()}


def drafting_temperature(fitted: Mapping[float, float], temperature: float) -> float:
    """The draft's temperature for a target at `temperature` > 0, by the ratio of the two where it was fitted.

    Between two fitted temperatures the ratio is interpolated; beyond them the nearest one's counts.
    """
    if not fitted:
        return temperature
    known = sorted(fitted)
    below = max((t for t in known if t <= temperature), default=known[0])
    above = min((t for t in known if t >= temperature), default=known[-1])
    share = (temperature - below) / (above - below) if above > below else 0.0
    return temperature * ((1 - share) * fitted[below] / below + share * fitted[above] / above)
