"""A process that a launcher has started: how many there are, and what `launch` expects of it."""

import os
import signal
import sys
import threading

# Tells a child of `launch` of the socket to its parent: "NUMBER:PID", with the parent's process id.
CHANNEL = "FLOWGRPO_RC_CHANNEL"
MESSAGE_BYTES = 65536  # more might not fit into the socket, which is read only at the end


def launched_processes() -> int | None:
    """Returns how many processes a launcher has announced; None without a launcher."""
    announced = os.environ.get("WORLD_SIZE")
    return None if announced is None else int(announced)


def is_first() -> bool:
    """Returns whether this process is the only one, or the first that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"


def is_child() -> bool:
    """Returns whether `launch` has started this process."""
    return _channel() is not None


def follow_parent() -> None:
    """Lets a child of `launch` end at once when its parent is gone; nothing in other processes."""
    channel = _channel()
    if channel is not None:
        os.set_inheritable(channel, False)
        threading.Thread(target=_end_with_parent, args=(channel,), daemon=True).start()


def say_error(message: str) -> None:
    """Prints a message to stderr; `launch` prints once what several children say."""
    channel = _channel()
    if channel is None:
        print(message, file=sys.stderr)
    else:
        os.write(channel, message.encode()[:MESSAGE_BYTES])


def _channel() -> int | None:
    """The number of the socket to the parent; None if `launch` has not started this process."""
    number, _, parent = os.environ.get(CHANNEL, "").partition(":")
    # A program that a child starts inherits the variable, but not the socket.
    return int(number) if parent == str(os.getppid()) else None


def _end_with_parent(channel: int) -> None:
    try:
        os.read(channel, 1)  # the parent never writes: this waits until its end closes
    finally:  # it fails if the parent has not read a message
        os.kill(os.getpid(), signal.SIGKILL)
