"""The connections of a server whose clients have not shown the token.

uvicorn waits for the headers of a request forever, and counts who only waits among those that it
serves. So idle or slow clients without a token would keep all others out.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

DEADLINE_S = 10.0  # from the connection to the headers with the token
MOST_OUTSIDE = 128  # connections without it


class Door:
    """Closes connections that do not show the token in time, and the oldest if they are too many.

    A new one takes the place of the oldest, so a client gets in that shows its token at once.
    """

    def __init__(self, deadline_s: float = DEADLINE_S, most: int = MOST_OUTSIDE) -> None:
        self._deadline_s = deadline_s
        self._most = most
        self._outside: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # the oldest first

    def knock(self, transport: asyncio.Transport) -> None:
        """Begins the deadline of a new connection."""
        loop = asyncio.get_running_loop()
        self._outside[transport] = loop.call_later(self._deadline_s, transport.abort)
        if len(self._outside) > self._most:
            next(iter(self._outside)).abort()

    def leave(self, transport: asyncio.Transport) -> None:
        """Ends the deadline of a connection: it has shown the token, or it is gone."""
        timer = self._outside.pop(transport, None)
        if timer is not None:
            timer.cancel()


def protocol(door: Door) -> type[H11Protocol]:
    """Returns the protocol of connections that come through a door.

    `request.state.let_in()` tells that a request has shown the token. h11 bounds the headers.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "let_in": partial(door.leave, transport)}
            door.knock(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            door.leave(self.transport)
            super().connection_lost(exc)

    return Connection
