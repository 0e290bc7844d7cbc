"""The verb `decode`: one prompt, one answer, streamed with what the draft was worth."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.command_line import Device, Dtype, with_options
from decode.options import DecodeOptions

if TYPE_CHECKING:
    from decode.answer import Answer


@with_options
def decode(
    target: Annotated[str, typer.Option(help="Target: a folder, a Hub id[@revision] or a GGUF file.")],
    prompt: Annotated[str, typer.Option(help="The user's turn (or the bare text, with --raw).")],
    options: DecodeOptions,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft, named like the target; or lookup, or lookup+DRAFT. Without one: plain decoding."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")] = False,
    seed_exact: Annotated[
        bool, typer.Option("--seed-exact", help="Draw the very text that plain sampling draws with this seed.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a stream.")] = False,
) -> None:
    """Decode one prompt losslessly, with or without a draft, and say what the draft was worth."""
    from configs.errors import UserError
    from decode.answer import prompt_ids, stream
    from decode.drafts.kinds import load_draft
    from decode.models import load_model

    if draft is None:
        of_a_draft = {"num_draft_tokens", "draft_temperature", "latency_profile", "verifier", "quantize_draft"}
        given = [f"--{name.replace('_', '-')}" for name in sorted(of_a_draft & options.model_fields_set)]
        if given:
            raise UserError(f"{', '.join(given)}: no effect without --draft; name a draft or leave it out")
    if raw and options.template_argument:
        raise UserError("--template-argument has no effect with --raw; leave one of them out")
    replace(options.settings(), seed_exact=seed_exact)  # refuses bad values before any loading
    costs = options.costs(draft)
    loaded = replace(load_model(target, dtype, device), template_arguments=options.template_argument)
    proposer = load_draft(loaded, draft, dtype, device) if draft else None
    loaded = options.quantised(loaded, proposer)
    settings = replace(options.settings(loaded, costs), seed_exact=seed_exact)
    asked = list(loaded.tokenizer(prompt).input_ids) if raw else prompt_ids(loaded, prompt)
    longest = max(costs.v) if costs else settings.length_policy().next_length()
    if options.compile:
        loaded = replace(loaded, model=options.compiled(loaded.model, len(asked), longest))
        proposer = proposer and proposer.compiled(lambda model: options.compiled(model, len(asked), longest))
    growing = stream(loaded, proposer, asked, settings)
    if as_json:
        *_, answer = growing
        print(json.dumps(answer.as_json(), ensure_ascii=False))
        return
    printer = _Printer(loaded.tokenizer, loaded.eos_ids)
    for answer in growing:
        printer.show(answer)
    printer.finish(answer, _statistics(answer))


class _Printer:
    """Prints whole characters as they come. Accepted draft tokens are green, or in ‹ › where there is no colour."""

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True, emoji=False)
        self.colour = self.console.is_terminal and not self.console.no_color
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.shown = 0
        self.text = ""

    def show(self, answer: "Answer") -> None:
        accepted = answer.rounds[-1].accepted if answer.rounds else 0
        tokens = answer.token_ids
        drafted_until = self.shown + accepted
        if accepted:
            self._print(self._new_text(tokens[:drafted_until]), drafted=True)
        self._print(self._new_text(tokens), drafted=False)
        self.shown = len(tokens)

    def finish(self, answer: "Answer", statistics: str) -> None:
        self._print(self._new_text(answer.token_ids, whole=True), drafted=False)
        self.console.print()
        key = "green" if self.colour else "in ‹ ›"
        legend = f" · accepted draft tokens are {key}" if answer.totals.drafted else ""
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


def _statistics(answer: "Answer") -> str:
    tally = answer.totals
    parts = [f"{len(answer.token_ids)} tokens", f"prefill {answer.prefill_s:.2f} s"]
    if answer.decode_s:
        parts.append(f"decode {(len(answer.token_ids) - 1) / answer.decode_s:.1f} tokens/s")
    if tally.drafted and tally.tau is not None:
        parts.append(f"accepted {tally.accepted} of {tally.drafted} drafted")
        parts.append(f"τ {tally.tau:.2f}")
    return " · ".join([*parts, f"stopped by {answer.stopped_by}"])
