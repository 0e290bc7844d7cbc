"""Prompt sets: our own by name, anybody's by path or Hub id, in the formats of the usual benchmarks."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from configs.bad_rows import BadRows
from configs.errors import UserError
from configs.records import read_records
from decode.conversations import SAID, Message, to_messages
from eval.sources import source_records

IDS = ("id", "question_id", "prompt_id", "task_id")
FOLDER = Path(__file__).resolve().parent.parent / "configs" / "prompts"


@dataclass(frozen=True)
class Prompt:
    """A chat that waits for an answer, and the user turns that come after it. `where` is 'FILE:LINE' for messages."""

    id: str
    category: str
    messages: tuple[Message, ...]
    where: str
    tools: tuple[Any, ...] = ()
    later_turns: tuple[str, ...] = ()
    turn: int = 1

    def next_turn(self, answer: str) -> "Prompt | None":
        """The chat with `answer` and its next user turn, under the id 'ID/2', 'ID/3', ...; None after the last."""
        if not self.later_turns:
            return None
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later_turns[0]})
        base, turn = self.id.removesuffix(f"/{self.turn}") if self.turn > 1 else self.id, self.turn + 1
        messages = (*self.messages, *said)
        return replace(self, id=f"{base}/{turn}", messages=messages, later_turns=self.later_turns[1:], turn=turn)

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


def read_suite(name: str, split: str = "test", subset: str | None = None) -> list[Prompt]:
    """The prompts of one of our sets, of a file, or of a data set: a saved one's folder or a Hub id[@revision].

    Raises UserError as `read_prompts`, and for a name that is none of these.
    """
    if (FOLDER / f"{name}.jsonl").is_file() or Path(name).is_file() or not ("/" in name or Path(name).is_dir()):
        return read_prompts(find_prompts(name))
    bad = BadRows()
    return _prompts(name, source_records(name, split, bad, subset), bad)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """16 hex digits of what is asked, in which order."""
    said = [[prompt.id, prompt.category, prompt.messages, prompt.tools, prompt.later_turns] for prompt in prompts]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(path: Path, bad: BadRows | None = None) -> list[Prompt]:
    """Read rows with a `prompt`, a chat (decode.conversations) or `turns`, and optional `id` and `category`.

    An answer that ends a chat is dropped: the target writes its own. `turns` are user turns, each answered before the
    next is asked (Spec-Bench, MT-Bench; a `prompt` that is a list of texts is the same). `question_id`, `prompt_id` and
    `task_id` are ids (HumanEval); a `question` is a prompt (GSM8K). A row without an id gets one from its text.
    Raises UserError naming file and line for a bad row or a repeated id, unless `bad` skips them, and for a file
    without rows.
    """
    bad = bad or BadRows()
    return _prompts(str(path), read_records(path, bad), bad)


def _prompts(source: str, rows: Iterable[tuple[str, dict[str, Any]]], bad: BadRows) -> list[Prompt]:
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        try:
            prompt = _prompt(row, where)
            ids = [prompt.id, *(f"{prompt.id}/{turn}" for turn in range(2, 2 + len(prompt.later_turns)))]
            taken = next((identity for identity in ids if identity in seen), None)
            if taken:
                raise UserError(f"id {taken!r} stands already at {seen[taken]}")
        except UserError as error:
            bad.refuse(where, str(error))
            continue
        seen |= dict.fromkeys(ids, where)
        prompts.append(prompt)
    if not prompts:
        raise UserError("; ".join([f"{source}: no rows in it", *bad.lines()]))
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
    messages, later = _turns(row)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise UserError("expected a user turn to answer")
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise UserError(f"tools: expected a list, got {type(tools).__name__}")
    text = "\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
    named = next((str(row[name]) for name in IDS if row.get(name) is not None), None)
    identity = named or hashlib.sha256(text.encode()).hexdigest()[:12]
    return Prompt(identity, str(row.get("category") or "all"), tuple(messages), where, tuple(tools), later)


def _turns(row: dict[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    """The chat of a row, and the user turns after it. An answer in a column of its own is not looked at."""
    turns = row.get("turns")
    if turns is None:
        turns = row.get("prompt")
        if not _are_texts(turns):
            return to_messages({name: value for name, value in row.items() if name not in SAID}), ()
    if not _are_texts(turns):
        raise UserError("turns: expected a list of texts, at least one")
    return [{"role": "user", "content": turns[0]}], tuple(turns[1:])


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
