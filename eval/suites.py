"""Prompt sets: our own by name, anybody's by path."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from decode.conversations import Message, to_messages

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "prompts"


@dataclass(frozen=True)
class Prompt:
    """A chat that waits for an answer. `where` is 'FILE:LINE' for messages."""

    id: str
    category: str
    messages: tuple[Message, ...]
    where: str
    tools: tuple[Any, ...] = ()

    def arguments(self, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template is rendered with for this prompt."""
        return {**template_arguments, **({"tools": list(self.tools)} if self.tools else {})}


def find_prompts(name_or_path: str) -> Path:
    """The file of a named prompt set (configs/prompts/NAME.jsonl) or of a path. Raises UserError."""
    named = FOLDER / f"{name_or_path}.jsonl"
    if named.is_file():
        return named
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.jsonl")))
    raise UserError(f"{name_or_path}: no such prompt file; expected a .jsonl or .parquet file, or one of: {known}")


def read_prompts(path: Path, bad: BadRows | None = None) -> list[Prompt]:
    """Read rows with a `prompt` or a chat (decode.conversations), and optional `id` and `category`.

    An answer that ends a chat is dropped: the target writes its own. A row without an id gets one from its text.
    Raises UserError naming file and line for a bad row or a repeated id, unless `bad` skips them, and for a file
    without rows.
    """
    bad = bad or BadRows()
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, row in read_records(path, bad):
        try:
            prompt = _prompt(row, where)
            if prompt.id in seen:
                raise UserError(f"id {prompt.id!r} stands already at {seen[prompt.id]}")
        except UserError as error:
            bad.refuse(where, str(error))
            continue
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise UserError("; ".join([f"{path}: no rows in it", *bad.lines()]))
    return prompts


def stratified(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts taken from the categories in turn, so that each has its share; all when count is larger."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    rounds = max(len(members) for members in by_category.values())
    in_turn = [members[i] for i in range(rounds) for members in by_category.values() if i < len(members)]
    return in_turn[:count]


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    """Raises UserError without the place, which the caller adds."""
    messages = to_messages(row)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise UserError("expected a user turn to answer")
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise UserError(f"tools: expected a list, got {type(tools).__name__}")
    text = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
    identity = str(row["id"]) if row.get("id") is not None else hashlib.sha256(text.encode()).hexdigest()[:12]
    return Prompt(identity, str(row.get("category", "all")), tuple(messages), where, tuple(tools))
