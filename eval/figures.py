"""What each prompt of a measurement gave: enough to work out every headline again, or to compare two reports."""

from collections.abc import Sequence

from pydantic import BaseModel

from decode.trace import Tally
from eval.live import Arm, PromptRun
from eval.replay import Replay
from eval.stats import Timed
from eval.text import repeated_tokens


class ArmFigures(BaseModel):
    """Tokens of the answer, the first of them from prefill, and seconds."""

    tokens: int
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, arm: Arm) -> "ArmFigures":
        return cls(tokens=len(arm.token_ids), prefill_s=arm.prefill_s, decode_s=arm.decode_s)

    @property
    def decode(self) -> Timed:
        return Timed(self.decode_s, max(0, self.tokens - 1))

    @property
    def end_to_end(self) -> Timed:
        return Timed(self.prefill_s + self.decode_s, self.tokens)


class PromptFigures(BaseModel):
    """Counts of the speculative answer; `overlap` is Σα over the `places` of the plain one."""

    id: str
    category: str
    plain: ArmFigures
    speculative: ArmFigures
    hf: ArmFigures
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    overlap: float
    places: int
    repeated_tokens: int

    @classmethod
    def of(cls, run: PromptRun, text: Replay) -> "PromptFigures":
        tally, overlap = Tally.of(run.trace.rounds), text.number(0).overlap
        return cls(
            id=run.prompt.id, category=run.prompt.category, plain=ArmFigures.of(run.plain),
            speculative=ArmFigures.of(run.speculative), hf=ArmFigures.of(run.hf), **vars(tally), overlap=sum(overlap),
            places=len(overlap), repeated_tokens=repeated_tokens(run.trace.token_ids),
        )  # fmt: skip


def tau_parts(prompts: Sequence[PromptFigures]) -> list[tuple[float, float]]:
    """Of each prompt what τ is the ratio of."""
    return [(prompt.emitted, prompt.rounds) for prompt in prompts]


def alpha_parts(prompts: Sequence[PromptFigures]) -> list[tuple[float, float]]:
    """Of each prompt what α is the ratio of."""
    return [(prompt.overlap, prompt.places) for prompt in prompts]
