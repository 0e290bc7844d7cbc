"""Defaults < YAML file < section.field=value, checked against a settings class."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import UserError
from configs.files import write_text

Typed = TypeVar("Typed", bound=BaseModel)


def read_config(kind: type[Typed], path: Path | None, overrides: Iterable[str] = ()) -> Typed:
    """Read `path` (YAML; None for defaults alone), lay `section.field=value` overrides on it and check both.

    Raises UserError naming the file (or the override), the key and the nearest known key.
    """
    tree = read_yaml(path) if path else {}
    overrides = list(overrides)
    for override in overrides:
        _set_by_path(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [f"{_source(item, path, overrides)}: {_explain(kind, item)}" for item in error.errors()]
        raise UserError("; ".join(problems)) from None


def checked(kind: type[Typed], values: Mapping[str, Any]) -> Typed:
    """The settings that `values` give. Raises UserError naming each wrong value and what was expected."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("; ".join(_explain(kind, item) for item in error.errors())) from None


def read_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as a mapping; values are read as YAML. Raises UserError for text without an equals sign."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UserError(f"{pair!r}: expected NAME=VALUE")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{pair!r}: the value is not valid YAML; quote it") from None
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises UserError when it is missing, broken or another thing."""
    if not path.is_file():
        raise UserError(f"{path}: no such config file")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping of keys to values, got {type(tree).__name__}")
    return tree


def write_config(config: BaseModel, path: Path) -> None:
    """Save the resolved settings as YAML, so that an output folder says how it was made."""
    write_text(path, to_yaml(config))


def to_yaml(config: BaseModel) -> str:
    """The settings as YAML text: every default written out, and after each value what it means."""
    return "".join(line + "\n" for line in _yaml_lines(config, indent=""))


def _yaml_lines(config: BaseModel, indent: str) -> Iterator[str]:
    plain = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            flow = yaml.safe_dump({name: plain[name]}, default_flow_style=True, allow_unicode=True, width=10**6)
            line = indent + flow.strip()[1:-1]
            yield f"{line:<40}  # {field.description}" if field.description else line


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys whose values differ between two trees."""
    names: list[str] = []
    for key in [*one, *(key for key in other if key not in one)]:
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names += differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(prefix + key)
    return names


def _set_by_path(tree: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise UserError(f"override {override!r}: expected section.field=value, e.g. train.steps=100")
    *sections, field = path.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise UserError(f"override {override!r}: {section} holds a value, not a section")
    try:
        node[field] = yaml.safe_load(value) if value else None
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML; quote it") from None


def _source(error: Any, path: Path | None, overrides: list[str]) -> str:
    """The override or the file that a wrong value stands in."""
    dotted = ".".join(str(part) for part in error["loc"])
    from_command_line = any(f"{dotted}.".startswith(override.partition("=")[0] + ".") for override in overrides)
    return str(path) if path and not from_command_line else "the command line"


def _explain(kind: type[BaseModel], error: Any) -> str:
    *sections, last = error["loc"] or ("",)
    dotted = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _fields(kind, sections)
        near = difflib.get_close_matches(str(last), known, n=1)
        return f"unknown key {dotted!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    if error["type"] == "missing":
        return f"{dotted!r} is required"
    return f"{dotted}: {error['msg'].removeprefix('Value error, ')} (got {error['input']!r})"


def _fields(kind: type[BaseModel], sections: Iterable[Any]) -> list[str]:
    for section in sections:
        inner = kind.model_fields[str(section)].annotation if str(section) in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
