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
from multiprocessing.connection import Connection
from typing import Any

from flowgrpo_rc.rollout.vllm_omni.channel import Message, receive, send


async def serve(connection: Connection) -> None:
    """Answers until asked to close. Reports a request that fails; the trainer decides the rest.

    The request `start` makes the host, which imports vLLM-Omni.
    """
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
    host: Any = None
    while (request := await inbox.get()).kind != "close":
        try:
            if host is None:
                from flowgrpo_rc.rollout.vllm_omni.host import Host

                host = Host(request.fields)
                replies = host.start()
            else:
                answer = {"sync": host.sync, "generate": host.generate}[request.kind]
                replies = answer(request.fields, request.tensors)
            async for reply in replies:
                send(connection, *reply)
        except Exception as error:  # the border of the process
            traceback.print_exc()
            send(connection, "error", {"error": f"{type(error).__name__}: {error}"}, {})
    if host is not None:
        host.close()


if __name__ == "__main__":
    asyncio.run(serve(Connection(int(sys.argv[1]))))
