"""Where speculation stops paying as more texts decode together: the same prompts at several batch sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from configs.records import append_record, whole_records
from decode.batch import generate_batch_ids
from decode.batch_reader import BatchReader
from decode.drafts.contract import Draft
from decode.generation import Generation, Settings
from decode.models import Loaded
from decode.trace import Tally
from eval.report import BatchPoint
from eval.stats import Timed, speedup


def check_batches(target: Loaded, draft: Draft[Any], sizes: Sequence[int]) -> None:
    """Raises UserError when one of the two models cannot read several texts together."""
    for model in (target.model, *(() if draft.taps else (draft.model,))) if sizes else ():
        if list(model.parameters()):
            BatchReader(model, 1)


def sweep_batches(
    target: Loaded, draft: Draft[Any], prompts: Sequence[list[int]], settings: Settings, sizes: Sequence[int],
    unfinished: Path,
) -> list[BatchPoint]:  # fmt: skip
    """One point for each size; those that `unfinished` has already are read back."""
    points = [BatchPoint.model_validate(row) for row in whole_records(unfinished)]
    left = sizes[len(points) :]
    for size in track(left, "other batch sizes") if left else ():
        points.append(_point(target, draft, prompts, settings, size))
        append_record(unfinished, points[-1].model_dump(mode="json"))
    return points


def _point(
    target: Loaded, draft: Draft[Any], prompts: Sequence[list[int]], settings: Settings, size: int
) -> BatchPoint:
    """Plain and speculative in turn, batch by batch; fewer prompts than a batch has places are asked several times."""
    asked = [prompts[i % len(prompts)] for i in range(-(-len(prompts) // size) * size)]
    plain: list[Generation] = []
    drafted: list[Generation] = []
    for number, start in enumerate(range(0, len(asked), size)):
        some = asked[start : start + size]
        for arm in (plain, drafted) if number % 2 == 0 else (drafted, plain):
            arm += generate_batch_ids(
                target.model, draft if arm is drafted else None, some, settings, target.tokenizer
            )  # fmt: skip
    timed = [[Timed(answer.decode_s, len(answer.token_ids) - 1) for answer in arm] for arm in (plain, drafted)]
    return BatchPoint(
        batch=size, prompts=len(asked), plain_tokens_per_s=_pace(plain), speculative_tokens_per_s=_pace(drafted),
        tau=Tally.of([done for answer in drafted for done in answer.rounds]).tau, speedup_decode=speedup(*timed),
    )  # fmt: skip


def _pace(answers: Sequence[Generation]) -> float | None:
    """Tokens per second of all texts together, after prefill."""
    seconds = sum(answer.decode_s for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / seconds if seconds else None
