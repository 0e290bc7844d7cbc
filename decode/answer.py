"""From words to words: `decode.generate` and `decode.stream`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from configs.errors import UserError
from configs.reader import checked
from decode.batch import generate_batch_ids
from decode.chat import render_prompt
from decode.conversations import Message, to_messages
from decode.drafts.contract import Draft
from decode.generation import Generation, Settings, generate_ids, stream_ids
from decode.models import Loaded
from decode.options import DecodeOptions
from decode.prompt_cache import PromptCache
from decode.stops import cut_text
from decode.trace import Round, Tally

Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What came out, round by round and in total. Seconds are of the prompt's pass and of all that followed.

    `text` leaves special tokens out and ends with the stop string, where one ended it.
    """

    token_ids: list[int]
    text: str
    rounds: list[Round]
    totals: Tally
    stopped_by: str
    seed: int
    prefill_s: float
    decode_s: float

    def as_json(self) -> dict[str, Any]:
        """Plain values: ids, text, rounds, and the statistics of the whole."""
        decoded = len(self.token_ids) - 1
        statistics = asdict(self.totals) | {
            "new_tokens": len(self.token_ids),
            "accepted_share": self.totals.accepted_share,
            "tau": self.totals.tau,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": decoded / self.decode_s if self.decode_s else None,
        }
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "stopped_by": self.stopped_by,
            "seed": self.seed,
            "rounds": [asdict(done) for done in self.rounds],
            "statistics": statistics,
        }


def generate(
    target: Loaded, draft: Draft[Any] | None, prompt: Prompt, settings: Settings | None = None,
    cache: PromptCache | None = None, **options: Any,
) -> Answer:  # fmt: skip
    """Decode `prompt` losslessly: a user's turn, a chat, or token ids. Without `draft` this is plain decoding.

    `cache`, given to several calls, keeps what their prompts have in common (decode/prompt_cache.py).

    How, is said by `options` (see DecodeOptions) or by `settings`, which can say more. Neither model's weights or
    config are changed, nor torch's global random state. Raises UserError for what cannot be honoured.
    """
    target, settings = _prepared(target, settings, options)
    ids = prompt_ids(target, prompt)
    grown = generate_ids(target.model, draft, ids, settings, target.tokenizer, cache=cache)
    return _answer(grown, target, settings)


def generate_batch(
    target: Loaded,
    draft: Draft[Any] | None,
    prompts: Sequence[Prompt],
    settings: Settings | None = None,
    **options: Any,
) -> list[Answer]:
    """Decode several prompts together: each gets what `generate` gives it alone, prompt i with seed + i.

    Raises UserError as `generate`, and for models whose cache forgets tokens.
    """
    target, settings = _prepared(target, settings, options)
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise UserError("prompts: expected a list of prompts, each a text, a chat or a list of token ids")
    ids = [prompt_ids(target, prompt) for prompt in prompts]
    grown = generate_batch_ids(target.model, draft, ids, settings, target.tokenizer)
    return [_answer(one, target, settings) for one in grown]


def stream(
    target: Loaded, draft: Draft[Any] | None, prompt: Prompt, settings: Settings | None = None, **options: Any
) -> Iterator[Answer]:
    """Like `generate`, but yields the answer so far after the prompt's pass and after every round."""
    target, settings = _prepared(target, settings, options)
    for grown in stream_ids(target.model, draft, prompt_ids(target, prompt), settings, target.tokenizer):
        yield _answer(grown, target, settings)


def prompt_ids(target: Loaded, prompt: Prompt) -> list[int]:
    """Token ids of a user's turn or a chat under the target's template; ids stay what they are.

    Raises UserError for anything else, several prompts at once included.
    """
    if isinstance(prompt, str):
        return render_prompt(target.tokenizer, [{"role": "user", "content": prompt}], target.template_arguments)
    if all(isinstance(part, int) for part in prompt):
        return cast(list[int], list(prompt))
    if not all(isinstance(part, Mapping) for part in prompt):
        raise UserError("prompt: expected one text, one chat (role and content) or one list of token ids")
    return render_prompt(target.tokenizer, to_messages({"messages": list(prompt)}), target.template_arguments)


def _prepared(target: Loaded, settings: Settings | None, options: dict[str, Any]) -> tuple[Loaded, Settings]:
    if settings is not None:
        if options:
            raise UserError(f"give settings or options, not both (got {', '.join(options)})")
        return target, settings
    asked = checked(DecodeOptions, options)
    if asked.compile:
        raise UserError("compile: wrap the models in decode.compiled.Compiled once, for many calls")
    if asked.quantize_target or asked.quantize_draft:
        raise UserError(
            "quantize_target, quantize_draft: quantise the models once, with decode.quantise, for many calls"
        )
    if asked.template_argument:
        target = replace(target, template_arguments=asked.template_argument)
    return target, asked.settings(target, asked.costs())


def _answer(grown: Generation, target: Loaded, settings: Settings) -> Answer:
    text = target.tokenizer.decode(grown.token_ids, skip_special_tokens=True)
    return Answer(
        token_ids=list(grown.token_ids),
        text=cut_text(str(text), settings.stops.strings),
        rounds=list(grown.rounds),
        totals=grown.tally,
        stopped_by=grown.stopped_by,
        seed=grown.seed,
        prefill_s=grown.prefill_s,
        decode_s=grown.decode_s,
    )
