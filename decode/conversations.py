"""Rows of any common shape as chats: roles and columns under one name, nothing dropped in silence."""

from collections.abc import Mapping
from typing import Any

from configs.errors import UserError

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
COLUMNS = ("messages", "conversations", "conversation")
ASKED, SAID = ("prompt", "question"), ("completion", "response", "answer")
CHAT_COLUMNS = (*COLUMNS, *ASKED, *SAID, "system")  # what `to_messages` reads


def to_messages(row: Mapping[str, Any]) -> list[Message]:
    """The chat of a row: `messages` or `conversations` (role/content or from/value), or `prompt` and `completion`,
    also called `question`, `response` and `answer`.

    What else a turn carries (tool calls, reasoning, names) is kept for the template. A `prompt` alone is a user turn;
    a `system` column is the system turn of a chat that has none.
    Raises UserError naming the column, turn or role that cannot be read.
    """
    chat, system = _chat(row), row.get("system")
    if isinstance(system, str) and system.strip() and chat[0]["role"] != "system":
        return [{"role": "system", "content": system}, *chat]
    return chat


def _chat(row: Mapping[str, Any]) -> list[Message]:
    column = next((name for name in COLUMNS if row.get(name) is not None), None)
    if column:
        return _turns(row[column], column)
    asked = next((name for name in ASKED if row.get(name) is not None), None)
    if asked:
        said = next((name for name in SAID if row.get(name) is not None), None)
        chat = _text_or_turns(row[asked], asked, "user")
        return chat + (_text_or_turns(row[said], said, "assistant") if said else [])
    columns = ", ".join(row) or "nothing"
    hint = " (data.text=true learns from every token of plain text)" if "text" in row else ""
    raise UserError(f"no chat in it: expected messages, conversations, or prompt and completion; got {columns}{hint}")


def _text_or_turns(value: Any, column: str, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns(value, column)


def _turns(turns: Any, column: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{column}: expected a list of turns, got {type(turns).__name__}")
    return [_turn(turn, f"{column}, turn {number}") for number, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where}: expected a role and a content, got a {type(turn).__name__}")
    # A Parquet column of mixed turns has all their keys, and nothing under those of the other shape.
    role = turn.get("from") if turn.get("role") is None else turn["role"]
    if not isinstance(role, str):
        raise UserError(f"{where}: each turn needs a role and a content; got a {type(role).__name__} as its role")
    if role not in ROLES:
        raise UserError(f"unknown role {role!r}; expected {', '.join(ROLES)}")
    said = turn.get("value") if turn.get("content") is None else turn["content"]
    content = _content(said, where)
    if content is None and not turn.get("tool_calls"):
        raise UserError(f"{where}: each turn needs a role and a content, both text; got a {type(said).__name__}")
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": ROLES[role], "content": "" if content is None else content, **extra}


def _content(content: Any, where: str) -> str | None:
    """Text, or a list of text parts as multimodal data has them."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        others = sorted({str(part.get("type")) for part in content} - {"text"})
        if others:
            raise UserError(f"{where}: {', '.join(others)} parts; only text can be used")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise UserError(f"{where}: a text part without text")
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None
