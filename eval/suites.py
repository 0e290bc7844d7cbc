"""Prompt sets: our own by name, anybody's by path."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.records import read_records

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "prompts"


@dataclass(frozen=True)
class Prompt:
    """A chat that waits for an answer. `where` is 'FILE:LINE' for messages."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]
    where: str


def find_prompts(name_or_path: str) -> Path:
    """The file of a named prompt set (configs/prompts/NAME.jsonl) or of a path. Raises UserError."""
    named = FOLDER / f"{name_or_path}.jsonl"
    if named.is_file():
        return named
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.jsonl")))
    raise UserError(f"{name_or_path}: no such prompt file; expected a .jsonl or .parquet file, or one of: {known}")


def read_prompts(path: Path) -> list[Prompt]:
    """Read rows with `prompt` (a string) or `messages` (role and content), and optional `id` and `category`.

    An answer that ends `messages` is dropped: the target writes its own. A row without an id gets one from its
    text. Raises UserError naming file and line for a bad row, a repeated id, or a file without rows.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, row in read_records(path):
        prompt = _prompt(row, where)
        if prompt.id in seen:
            raise UserError(f"{where}: id {prompt.id!r} stands already at {seen[prompt.id]}")
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: no rows in it")
    return prompts


def stratified(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts taken from the categories in turn, so that each has its share; all when count is larger."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    rounds = max(len(members) for members in by_category.values())
    in_turn = [members[i] for i in range(rounds) for members in by_category.values() if i < len(members)]
    return in_turn[:count]


def check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    """The messages of a row as a plain list of role and content. Raises UserError naming file and line."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages: expected a list of turns, got {type(messages).__name__}")
    for turn in messages:
        if not (isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            raise UserError(f"{where}: each turn needs a role and a content, both text; got {turn!r:.80}")
        if turn["role"] not in ("system", "user", "assistant"):
            raise UserError(f"{where}: unknown role {turn['role']!r}; expected system, user or assistant")
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    if isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    elif "messages" in row:
        messages = check_messages(row["messages"], where)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] != "user":
            raise UserError(f"{where}: expected a user turn to answer")
    else:
        raise UserError(f"{where}: expected `prompt` or `messages`, got {', '.join(row) or 'an empty row'}")
    text = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
    identity = str(row["id"]) if row.get("id") is not None else hashlib.sha256(text.encode()).hexdigest()[:12]
    return Prompt(identity, str(row.get("category", "all")), tuple(messages), where)
