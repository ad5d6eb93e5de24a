"""The engine's process: `python -m flowgrpo_rc.rollout.vllm_omni.child SOCKET`.

`EngineProcess` starts it; people never do. One event loop serves one request after the other. A
thread reads the socket, so this process ends as soon as the trainer does, even in the middle of a
forward.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from flowgrpo_rc.rollout.vllm_omni.channel import Message, receive, send

if TYPE_CHECKING:
    from flowgrpo_rc.rollout.vllm_omni.host import Host


class Session:
    """Answers requests. The request `start` makes the host, which imports vLLM-Omni."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def answer(self, request: Message) -> AsyncIterator[Message]:
        """Yields the replies to a request, the last of which is `done`."""
        if request.kind == "start":
            from flowgrpo_rc.rollout.vllm_omni.host import Host

            self._host = Host(request.fields)
            async for reply in self._host.start():
                yield reply
            return
        assert self._host is not None, "the first request starts the engine"
        replies = {"sync": self._host.sync, "generate": self._host.generate}[request.kind]
        async for reply in replies(request.fields, request.tensors):
            yield reply

    def close(self) -> None:
        """Ends the host, if there is one."""
        if self._host is not None:
            self._host.close()


async def serve(connection: Connection) -> None:
    """Answers until asked to close. Reports a request that fails; the trainer decides the rest."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, receive(connection))
        except (EOFError, OSError):
            # The trainer is gone: end this process and all that it started.
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    session = Session()
    while (request := await inbox.get()).kind != "close":
        try:
            async for reply in session.answer(request):
                send(connection, *reply)
        except Exception as error:  # the border of the process
            traceback.print_exc()
            send(connection, "error", {"error": f"{type(error).__name__}: {error}"}, {})
    session.close()


if __name__ == "__main__":
    asyncio.run(serve(Connection(int(sys.argv[1]))))
