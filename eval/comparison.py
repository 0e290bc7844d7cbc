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

SAME = (
    "target_revision", "run_dtype", "suite_fingerprint", "template_argument", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "bad_word", "logit_bias",
    "min_new_tokens", "max_new_tokens", "stop",
)  # fmt: skip


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
    told = [name for name in FIGURES if name != "S_decode" or (before.verdict.lossless and after.verdict.lossless)]
    return [change for name in told if (change := _change(name, before, after))]


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


Figure = Callable[[np.ndarray], np.ndarray]


def _change(name: str, before: Report, after: Report) -> Change | None:
    """None where no prompt says anything about it in both reports."""
    columns_of, figure = FIGURES[name]
    pairs = zip(before.prompts, after.prompts, strict=True)
    rows = [(*a, *b) for a, b in ((columns_of(a), columns_of(b)) for a, b in pairs) if a and b]
    if not rows:
        return None
    columns = np.array(rows, dtype=float)
    width = columns.shape[1] // 2
    sums, whole = resampled(columns), columns.sum(0)
    spread = None if sums is None else interval(figure(sums[:, width:]) - figure(sums[:, :width]))
    return Change(
        name=name, before=float(figure(whole[:width])), after=float(figure(whole[width:])), difference_ci=spread
    )


def _of_alpha(prompt: PromptFigures) -> Sequence[float]:
    return (prompt.overlap, prompt.places) if prompt.places else ()


def _of_tau(prompt: PromptFigures) -> Sequence[float]:
    return (prompt.emitted, prompt.rounds) if prompt.rounds else ()


def _of_speedup(prompt: PromptFigures) -> Sequence[float]:
    plain, ours = prompt.plain.decode, prompt.speculative.decode
    return (plain.seconds, plain.tokens, ours.seconds, ours.tokens) if plain.tokens and ours.tokens else ()


def _ratio(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[..., 0] / sums[..., 1]
    return ratio


def _speedup(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = _ratio(sums[..., :2]) / _ratio(sums[..., 2:])
    return ratio


FIGURES: dict[str, tuple[Callable[[PromptFigures], Sequence[float]], Figure]] = {
    "α": (_of_alpha, _ratio),
    "τ": (_of_tau, _ratio),
    "S_decode": (_of_speedup, _speedup),
}
