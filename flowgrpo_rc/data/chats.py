"""Chats in rows of prompt files, as verl and TRL write them: a list of messages in `prompt`."""

import re
from typing import Any

from flowgrpo_rc.data.readers import Row

Messages = tuple[dict[str, object], ...]
_ROLES = ("system", "developer", "user", "assistant", "tool")
# A chat or a `reward_model` that was written as text, by JSON or by Python.
_WRITTEN = re.compile(r"""\s*(\[\s*\{\s*["'](role|content)["']|\{.*["']ground_truth["'])""")


def read_chat(row: Row, where: str, *, whole: bool) -> tuple[Row, Messages]:
    """Turns the columns of verl into those of this project; leaves other rows as they are.

    A chat becomes the text of its last user message, and its system message becomes metadata. A
    ground truth that is a text becomes the target; beside any other one there is no target.
    Contents in parts are joined if all are texts.

    Args:
      row: the columns.
      where: the place of the row, for messages.
      whole: allow any messages, for a language model. The template of a pipeline has room for one
        message of the user and one of the system.

    Returns:
      The columns, and the messages of the prompt: none if it is a text, or not `whole`.

    Raises:
      ValueError: a message has no known role or no text, there are too many or too few, or a column
        holds a chat as text.
    """
    changed: dict[str, object] = dict(row)
    messages: Messages = ()
    for column in ("prompt", "negative_prompt", "reward_model"):
        text = row.get(column)
        if isinstance(text, str) and _WRITTEN.match(text):
            raise ValueError(
                f"{where}: {column} is a list or an object that was written as text: give it as "
                f"what it is, not {text!r:.100}"
            )
    for column in ("prompt", "negative_prompt"):
        given = row.get(column)
        if not isinstance(given, list):
            continue
        chat = tuple(_message(message, f"{where}: {column}") for message in given)
        said = {message["role"]: message["content"] for message in chat}
        if not whole and (len(said) < len(chat) or not said.keys() <= {"system", "user"}):
            raise ValueError(
                f"{where}: {column} must be a text, or a chat of one user message and at most one "
                f"system message; it has {given!r}"
            )
        if "user" not in said:
            raise ValueError(f"{where}: {column} is a chat without a user message")
        changed[column] = said["user"]
        if column == "prompt":
            messages = chat if whole else ()
            changed |= {"system_prompt": said["system"]} if "system" in said else {}
    match row:
        case {"reward_model": {"ground_truth": truth}} if row.get("target") is None:
            # Beside a truth that is no text none is guessed.
            changed["target"] = (truth or None) if isinstance(truth, str | None) else ""
    return changed, messages


def _message(message: Any, where: str) -> dict[str, object]:
    # Columns of parquet give every message the keys of all, without a value.
    found = dict(message) if isinstance(message, dict) else {}
    found = {name: value for name, value in found.items() if value is not None}
    match found.get("content"):
        case [*parts] if all(map(_is_text, parts)):
            found["content"] = "".join(part["text"] for part in parts)
        case None if found.get("tool_calls"):
            found["content"] = ""
    if found.get("role") not in _ROLES or not isinstance(found.get("content"), str):
        raise ValueError(
            f"{where} must be a text, or a chat of messages with a role ({', '.join(_ROLES)}) and "
            f"a text as content; it has {message!r}"
        )
    return found


def _is_text(part: Any) -> bool:
    """Returns whether a part of a content is a text, and not a picture that may have a caption."""
    kind = part.get("type") if isinstance(part, dict) else "none"
    return kind in (None, "text", "input_text") and isinstance(part.get("text"), str)
