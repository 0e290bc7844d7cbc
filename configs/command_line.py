"""How every command runs: a user's mistake is one line on stderr and exit code 2, a bug keeps its traceback."""

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from configs.errors import UserError
from configs.reader import checked

# Options that several verbs have in common.
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Settings laid over the file's.")
]
Config = Annotated[Path | None, typer.Option(help="YAML file with the settings; presets lie in configs/.")]
Device = Annotated[str, typer.Option(help="auto (the accelerator where there is one), cpu, cuda, cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
OnBadRow = Annotated[Literal["error", "skip"], typer.Option(help="error: stop at a bad row; skip: count it and go on.")]
Endpoint = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Ask OpenAI-compatible servers (.../v1) instead; several times for several."),
]
ServedModel = Annotated[str | None, typer.Option(help="The target's name on the server. Default: target.")]


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers, 1 or more, of an option like 1,4,16, ascending. Raises UserError naming the option."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UserError(f"{option} {text!r}: expected whole numbers from 1 with commas between")
    return numbers


def run_verb(verb: Callable[..., Any]) -> None:
    """Run one verb as a program of its own (`python -m decode ...`)."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(verb)
    _run(app)


def run_verbs(verbs: Mapping[str, Callable[..., Any]], help_text: str, before: Callable[..., None]) -> None:
    """Run a program with one sub-command for each verb, which may be two words. `before` has the options that stand
    before the verb, and runs first.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=help_text, rich_markup_mode=None)
    for name, verb in verbs.items():
        app.command(name)(verb)
    app.callback()(before)
    first = next((i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("-")), 1)
    if " ".join(sys.argv[first : first + 2]) in verbs:
        sys.argv[first : first + 2] = [" ".join(sys.argv[first : first + 2])]
    _run(app)


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A verb with a parameter `options`, a settings class, as a command with one option for each field of it.

    Name, default and help are the field's, so that they are written once. Raises UserError for a wrong value.
    """
    parameters = dict(inspect.signature(verb).parameters)
    kind = parameters.pop("options").annotation

    @functools.wraps(verb)
    def command(**given: Any) -> Any:
        values = {name: given.pop(name) for name in kind.model_fields}
        return verb(options=checked(kind, {k: v for k, v in values.items() if v is not None and v != []}), **given)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    fields = [_option(name, field) for name, field in kind.model_fields.items()]
    fields.sort(key=lambda parameter: parameter.default is None)  # what is required comes first
    command.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *fields]}
    return command


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = field.annotation
    is_list = isinstance(field.default, tuple | dict)
    if is_list:
        kind = list[str]
    elif "Literal" in str(kind):
        kind = str  # what is allowed, the settings check
    default: Any = inspect.Parameter.empty
    said, metavar = field.description or "", "<str>" if is_list else None
    if not field.is_required():
        kind, default = kind | None, None  # None tells an option left out from one that was given its default
        said += f"  [default: {field.default}]" if field.default not in (None, (), {}) else ""
    option = typer.Option(help=said, show_default=False, metavar=metavar)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _run(app: typer.Typer) -> None:
    try:
        app()
    except UserError as error:
        _end(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _end(f"{error.filename or 'writing'}: no space left; make room and start again: what was finished is whole")


def _end(line: str) -> None:
    """A user's mistake, or what only a user can mend."""
    rank = os.environ.get("RANK", "0")
    print(f"error: {line}" if rank == "0" else f"process {rank}: {line}", file=sys.stderr)
    sys.exit(2)
