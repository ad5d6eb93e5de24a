"""Chats in rows of prompt files, as verl and TRL write them: a list of messages in `prompt`."""

import re

from flowgrpo_rc.data.readers import Row
from flowgrpo_rc.plugins import refuse

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
        value = row.get(column)
        is_written = isinstance(value, str) and _WRITTEN.match(value)
        what = f"{where}: {column} is a list or an object that was written as text"
        refuse((is_written, f"{what}: give it as what it is, not {value!r:.100}"))
    for column in ("prompt", "negative_prompt"):
        value = row.get(column)
        if not isinstance(value, list):
            continue
        chat = tuple(_message(message, f"{where}: {column}") for message in value)
        said = {message["role"]: message["content"] for message in chat}
        has_others = len(said) < len(chat) or not said.keys() <= {"system", "user"}
        refuse(
            (
                not whole and has_others,
                "must be a text, or a chat of one user message and at most one system message; it "
                f"has {value!r}",
            ),
            ("user" not in said, "is a chat without a user message"),
            about=f"{where}: {column} ",
        )
        changed[column] = said["user"]
        if column == "prompt":
            messages = chat if whole else ()
            changed |= {"system_prompt": said["system"]} if "system" in said else {}
    match row:
        case {"reward_model": {"ground_truth": truth}} if row.get("target") is None:
            # Beside a truth that is no text none is guessed.
            changed["target"] = (truth or None) if isinstance(truth, str | None) else ""
    return changed, messages


def _message(message: object, where: str) -> dict[str, object]:
    # Columns of parquet give every message the keys of all, without a value.
    columns = dict(message) if isinstance(message, dict) else {}
    fields = {name: value for name, value in columns.items() if value is not None}
    match fields.get("content"):
        case [*parts] if all(map(_is_text, parts)):
            fields["content"] = "".join(part["text"] for part in parts)
        case None if fields.get("tool_calls"):
            fields["content"] = ""
    if fields.get("role") not in _ROLES or not isinstance(fields.get("content"), str):
        raise ValueError(
            f"{where} must be a text, or a chat of messages with a role ({', '.join(_ROLES)}) and "
            f"a text as content; it has {message!r}"
        )
    return fields


def _is_text(part: object) -> bool:
    """Returns whether a part of a content is a text, and not a picture that may have a caption."""
    if not isinstance(part, dict) or part.get("type") not in (None, "text", "input_text"):
        return False
    return isinstance(part.get("text"), str)
