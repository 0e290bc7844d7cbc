"""Two reports of the same prompts side by side, with paired intervals of what changed, and gates for CI."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from configs.errors import UserError
from configs.reader import differing_keys
from eval.figures import PromptFigures
from eval.report import Report
from eval.stats import Interval, interval, resampled

SAME = ("target_revision", "suite_fingerprint", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


class Change(BaseModel):
    """One figure of both reports; the interval is that of after - before, over prompts drawn for both alike."""

    name: str
    before: float
    after: float
    difference_ci: Interval | None


def read_report(path: Path) -> Report:
    """Raises UserError for a file that is not a report of this version."""
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: no such report; `draftsmith eval --out FOLDER` writes FOLDER/report.json") from None
    except (ValidationError, UnicodeDecodeError):
        raise UserError(f"{path}: not a report of this version; measure again") from None


def compare(before: Report, after: Report) -> list[Change]:
    """α, τ and S_decode. Each S is over its own run's plain decoding, so the machine's pace drops out.

    Raises UserError when the two are not of the same prompts and target under the same law.
    """
    first, second = ({name: report.settings.get(name) for name in SAME} for report in (before, after))
    different = differing_keys(first, second)
    pairs = list(zip(before.prompts, after.prompts, strict=False))
    if different or len(before.prompts) != len(after.prompts) or any(a.id != b.id for a, b in pairs):
        raise UserError(
            f"the two reports cannot be compared: different {', '.join(different) or 'prompts'}; "
            "measure both drafts with the same target, prompts and law"
        )
    changes = [_change("α", before, after, _alpha), _change("τ", before, after, _tau)]
    if before.verdict.lossless and after.verdict.lossless:
        changes.append(_change("S_decode", before, after, _speedup))
    return changes


def failed_gates(before: Report, after: Report, min_speedup: float | None, max_alpha_drop: float | None) -> list[str]:
    """What fails, in words: the second report's certificate, and the gates that are set, each by its point estimate."""
    failed = []
    if not after.verdict.lossless:
        failed.append("the second report's certificate failed: it claims no speed-up")
    elif min_speedup is not None and (after.verdict.speedup_decode or 0.0) < min_speedup:
        failed.append(f"S_decode {after.verdict.speedup_decode:.3f} is below {min_speedup:g}")
    drop = before.verdict.alpha - after.verdict.alpha
    if max_alpha_drop is not None and drop > max_alpha_drop:
        failed.append(f"α fell by {drop:.3f}, more than {max_alpha_drop:g}")
    return failed


Sums = Callable[[np.ndarray], np.ndarray]


def _change(name: str, before: Report, after: Report, figure: Sums) -> Change:
    columns = [np.array([_columns(prompt) for prompt in report.prompts], dtype=float) for report in (before, after)]
    both = resampled(np.concatenate(columns, axis=1))
    width = columns[0].shape[1]
    spread = None if both is None else interval(figure(both[:, width:]) - figure(both[:, :width]))
    first, second = (float(figure(column.sum(0))) for column in columns)
    return Change(name=name, before=first, after=second, difference_ci=spread)


def _columns(prompt: PromptFigures) -> Sequence[float]:
    plain, ours = prompt.plain.decode, prompt.speculative.decode
    both = (plain.seconds, plain.tokens, ours.seconds, ours.tokens) if plain.tokens and ours.tokens else (0.0,) * 4
    return [prompt.overlap, prompt.places, prompt.emitted, prompt.rounds, *both]


def _alpha(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[..., 0] / sums[..., 1]
    return ratio


def _tau(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[..., 2] / sums[..., 3]
    return ratio


def _speedup(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = (sums[..., 4] / sums[..., 5]) / (sums[..., 6] / sums[..., 7])
    return ratio
