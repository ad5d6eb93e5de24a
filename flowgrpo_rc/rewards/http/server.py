"""An HTTP server for a reward of the package, which the reward `remote` asks.

It demands a bearer token, limits time and size of a request and runs one call at a time.
"""

import asyncio
import hmac
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Samples
from flowgrpo_rc.rewards.http.wire import PATH, decode, encode_scores

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

HEADERS_S = 10.0  # from the connection to the headers with the token
BODY_S = 300.0  # for the body of a request, of a client that has shown the token
MOST_OUTSIDE = 128  # connections that have not shown the token
MOST_CONNECTIONS = 256  # of all clients; above, requests are answered 503


class Door:
    """Closes connections that do not show the token in time, and the oldest if they are too many.

    uvicorn waits for the headers of a request forever, and counts who only waits among those that
    it serves. So idle or slow clients without a token would keep all others out. A new connection
    takes the place of the oldest, so a client gets in that shows its token at once.
    """

    def __init__(self, deadline_s: float = HEADERS_S, most: int = MOST_OUTSIDE) -> None:
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


def make_app(reward: Reward, token: str, *, max_body_mb: float) -> "FastAPI":
    """Makes the application that scores requests in the format of `rewards/http/wire.py`.

    It answers 401 without the token, 408 to a body that takes too long, 413 to one that is too
    long, 422 to a body that is no request or whose samples the reward does not score, and 500 with
    the exception if the reward fails.
    """
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool

    app = FastAPI(title=type(reward).__name__, docs_url=None, redoc_url=None, openapi_url=None)
    one_at_a_time = asyncio.Lock()

    def authorize(request: Request) -> None:
        header = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(header, f"Bearer {token}".encode()):
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            raise HTTPException(401, "wrong or missing bearer token", headers)
        request.state.let_in()

    def read(content: bytes) -> tuple[Samples, list[Prompt]]:
        return decode(json.loads(content), reward.kind)

    @app.post(PATH, dependencies=[Depends(authorize)])
    async def score(request: Request) -> dict[str, object]:
        content = await _body(request, max_body_mb)
        try:
            samples, prompts = await run_in_threadpool(read, content)
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, f"the body is no request: {error}") from error
        async with one_at_a_time:
            if await request.is_disconnected():  # it gave up while others were served
                return {}
            try:
                return encode_scores(await run_in_threadpool(reward, samples, prompts))
            # A reward is foreign code: any exception of it fails this request and no other.
            except Exception as error:
                raise HTTPException(500, f"{type(error).__name__}: {error}") from error

    return app


async def _body(request: "Request", max_body_mb: float) -> bytes:
    """Returns the body of a request; refuses a long or slow one before all is read."""
    from fastapi import HTTPException

    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_body_mb * 1e6:
                    raise HTTPException(413, f"the body is longer than {max_body_mb:g} MB")
    except TimeoutError as error:
        raise HTTPException(408, f"the body took more than {BODY_S:g} s") from error
    return bytes(content)


def limits(door: Door) -> dict[str, Any]:
    """Returns the settings of uvicorn that an application of `make_app` needs.

    `request.state.let_in()` tells that a request has shown the token. h11 bounds the headers.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, "let_in": partial(door.leave, transport)}
            door.knock(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            door.leave(self.transport)
            super().connection_lost(exc)

    return {
        "http": Connection,
        "ws": "none",
        "limit_concurrency": MOST_CONNECTIONS,
        "access_log": False,
    }
