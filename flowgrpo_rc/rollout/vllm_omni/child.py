"""The engine's process: `python -m flowgrpo_rc.rollout.vllm_omni.child SOCKET`. Started by
`EngineProcess`, never by hand.

One event loop serves one request after the other. A thread reads the socket, so that the end of the
trainer ends this process at once, in the middle of a forward too.
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
    """Answers requests. `start` brings up the host, which imports vLLM-Omni."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def answer(self, request: Message) -> AsyncIterator[Message]:
        if request.kind == "start":
            from flowgrpo_rc.rollout.vllm_omni.host import Host

            self._host = Host(request.fields)
            yield Message("done", {}, {})
            return
        assert self._host is not None, "the first request starts the engine"
        replies = {"sync": self._host.sync, "generate": self._host.generate}[request.kind]
        async for reply in replies(request.fields, request.tensors):
            yield reply

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


async def serve(connection: Connection) -> None:
    """Answer until asked to close. A request that fails is reported; the trainer decides what
    follows.
    """
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, receive(connection))
        except (EOFError, OSError):
            os.killpg(
                os.getpid(), signal.SIGKILL
            )  # the trainer is gone: end with whatever was started here

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
