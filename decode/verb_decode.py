"""The verb `decode`: one prompt, one answer, streamed with what the draft was worth."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from decode.generate import Generation


def decode(
    target: Annotated[str, typer.Option(help="Target: a folder, a Hub id[@revision] or a GGUF file.")],
    prompt: Annotated[str, typer.Option(help="The user's turn (or the bare text, with --raw).")],
    draft: Annotated[
        str | None, typer.Option(help="Draft, named like the target. Without one: plain decoding.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="γ: tokens drafted per round, 1 or more.", show_default="3")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws (no effect when greedy).")] = 0,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (the accelerator where there is one), cpu, cuda, cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a stream.")] = False,
) -> None:
    """Decode one prompt losslessly, with or without a draft, and say what the draft was worth."""
    from configs.errors import UserError
    from decode.drafts.lm import LMDraft
    from decode.generate import Settings, stream
    from decode.laws import Law
    from decode.models import load_model
    from decode.stops import Stops

    if draft is None and num_draft_tokens is not None:
        raise UserError("--num-draft-tokens has no effect without --draft; name a draft or leave it out")
    num_draft_tokens = 3 if num_draft_tokens is None else num_draft_tokens
    law = Law(temperature, top_k, top_p)
    settings = Settings(law, max_new_tokens, num_draft_tokens, seed=seed)  # refuses bad values before any loading
    loaded = load_model(target, dtype, device)
    proposer = None
    if draft is not None:
        loaded_draft = load_model(draft, dtype, device)
        proposer = LMDraft.of_pair(loaded, loaded_draft)
    settings = Settings(
        replace(law, vocabulary=loaded.vocabulary), max_new_tokens, num_draft_tokens, Stops(loaded.eos_ids), seed
    )
    growing = stream(loaded.model, proposer, _prompt_ids(loaded.tokenizer, prompt, raw), settings)
    if as_json:
        *_, answer = growing
        print(json.dumps(_summary(answer, loaded.tokenizer), ensure_ascii=False))
        return
    printer = _Printer(loaded.tokenizer, loaded.eos_ids)
    for answer in growing:
        printer.show(answer)
    printer.finish(answer, _statistics(answer))


def _prompt_ids(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    from decode.chat import render_prompt

    if raw:
        return list(tokenizer(prompt).input_ids)
    return render_prompt(tokenizer, [{"role": "user", "content": prompt}])


class _Printer:
    """Prints whole characters as they come. Accepted draft tokens are green, or in ‹ › where there is no colour."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True, emoji=False)
        self.colour = self.console.is_terminal and not self.console.no_color
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.shown = 0
        self.text = ""

    def show(self, answer: "Generation") -> None:
        accepted = answer.rounds[-1].accepted if answer.rounds else 0
        tokens = answer.token_ids
        drafted_until = self.shown + accepted
        if accepted:
            self._print(self._new_text(tokens[:drafted_until]), drafted=True)
        self._print(self._new_text(tokens), drafted=False)
        self.shown = len(tokens)

    def finish(self, answer: "Generation", statistics: str) -> None:
        self._print(self._new_text(answer.token_ids, whole=True), drafted=False)
        self.console.print()
        key = "green" if self.colour else "in ‹ ›"
        legend = f" · accepted draft tokens are {key}" if answer.tally.drafted else ""
        self.console.print(statistics + legend, style="dim", markup=False)

    def _new_text(self, tokens: list[int], whole: bool = False) -> str:
        text = self.tokenizer.decode([t for t in tokens if t not in self.eos_ids])
        if not whole:
            text = text.rstrip("\ufffd")  # the rest of this character is still to come
        new, self.text = text[len(self.text) :], max(self.text, text, key=len)
        return str(new)

    def _print(self, text: str, drafted: bool) -> None:
        if drafted and text and not self.colour:
            text = f"‹{text}›"
        style = "green" if drafted else None
        self.console.print(text, end="", style=style, markup=False)


def _summary(answer: "Generation", tokenizer: Any) -> dict[str, Any]:
    tally = answer.tally
    return {
        "token_ids": answer.token_ids,
        "text": tokenizer.decode(answer.token_ids, skip_special_tokens=True),
        "stopped_by": answer.stopped_by,
        "rounds": [vars(done) for done in answer.rounds],
        "statistics": {
            "new_tokens": len(answer.token_ids),
            "rounds": tally.rounds,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "accepted_share": tally.accepted_share,
            "tau": tally.tau,
            "prefill_s": answer.prefill_s,
            "decode_s": answer.decode_s,
            "tokens_per_s": answer.decode_tokens / answer.decode_s if answer.decode_s else None,
        },
    }


def _statistics(answer: "Generation") -> str:
    tally = answer.tally
    parts = [f"{len(answer.token_ids)} tokens", f"prefill {answer.prefill_s:.2f} s"]
    if answer.decode_s:
        parts.append(f"decode {answer.decode_tokens / answer.decode_s:.1f} tokens/s")
    if tally.drafted and tally.tau is not None:
        parts.append(f"accepted {tally.accepted} of {tally.drafted} drafted")
        parts.append(f"τ {tally.tau:.2f}")
    return " · ".join([*parts, f"stopped by {answer.stopped_by}"])
