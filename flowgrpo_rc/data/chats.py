"""Chats in rows of prompt files, as verl and TRL write them: a list of messages in `prompt`."""

from __future__ import annotations

from typing import Any

from flowgrpo_rc.data.readers import Row

Messages = tuple[dict[str, object], ...]
_PIPELINE = ("system", "user")  # roles that a pipeline's own template has room for
_MODEL = ("system", "developer", "user", "assistant", "tool")


def messages_of(row: Row, where: str) -> Messages:
    """Returns the chat that a language model answers; none if the row's prompt is a text.

    Contents in parts are joined if all are texts. ValueError, with `where`, for a message without a
    known role or a text, or a chat without a user message.
    """
    chat = row.get("prompt")
    if not isinstance(chat, list):
        return ()
    messages = tuple(_message(message, f"{where}: prompt") for message in chat)
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"{where}: prompt is a chat without a user message")
    return messages


def plain_row(row: Row, where: str, messages: Messages = ()) -> Row:
    """Turns the columns of verl into those of this project; leaves other rows as they are.

    A chat becomes the text of its user message, the last one of `messages` if there are any. Its
    system message becomes metadata, since a pipeline has a template of its own. A ground truth that
    is a text becomes the target.
    """
    changed: dict[str, object] = dict(row)
    for column in ("prompt", "negative_prompt"):
        if isinstance(row.get(column), list):
            whole = column == "prompt" and messages
            found = _by_role(messages) if whole else _short_chat(row[column], f"{where}: {column}")
            changed[column] = found["user"]
            if column == "prompt" and "system" in found:
                changed["system_prompt"] = found["system"]
    match row:
        case {"reward_model": {"ground_truth": str(truth)}} if "target" not in row:
            changed["target"] = truth or None
    return changed


def _message(message: Any, where: str) -> dict[str, object]:
    # Columns of parquet give every message the keys of all, without a value.
    found = dict(message) if isinstance(message, dict) else {}
    found = {name: value for name, value in found.items() if value is not None}
    match found.get("content"):
        case [*parts] if all(_is_text(part) for part in parts):
            found["content"] = "".join(part["text"] for part in parts)
        case None if found.get("tool_calls"):
            found["content"] = ""
    if found.get("role") not in _MODEL or not isinstance(found.get("content"), str):
        raise ValueError(
            f"{where} must be a text, or a chat of messages with a role ({', '.join(_MODEL)}) and "
            f"a text as content; it has {message!r}"
        )
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _by_role(messages: Messages) -> dict[str, object]:
    """Returns the last content of each role."""
    return {str(message["role"]): message["content"] for message in messages}


def _short_chat(chat: Any, where: str) -> dict[str, object]:
    """Returns the contents of a chat of one turn by role, as a pipeline's template takes them."""
    found: dict[str, object] = {}
    for message in chat:
        match message:
            case {"role": str(role), "content": str(text)} if role in _PIPELINE and (
                role not in found
            ):
                found[role] = text
            case _:
                raise ValueError(
                    f"{where} must be a text, or a chat of one user message and at most one system "
                    f"message; it has {message!r}"
                )
    if "user" not in found:
        raise ValueError(f"{where} is a chat without a user message")
    return found
