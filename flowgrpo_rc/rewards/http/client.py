"""A JSON client for servers that are not trusted: they may hang, drip, lie or flood.

* Every call ends by its deadline.
* A failed request is sent again, after a random pause, only if the server surely did nothing or
  asks for it. After several failures in a row the server gets no calls for a while.
* Nothing is unpickled; redirects and compressed answers are refused; an answer is read up to a
  limit.
* The token comes from an environment variable that the configuration names. It is removed from
  all that the server says before that reaches a message.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import os
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flowgrpo_rc.plugins import check_packages

if TYPE_CHECKING:
    import httpx2
    from tenacity import RetryCallState

PACKAGES = ("httpx2", "tenacity")
PROBE_S = 10.0  # how long a probe waits
NO_ACCESS = (401, 403)
BUSY = (429, 502, 503, 504)  # the server, or a proxy before it, asks to come again
_LONGEST_QUOTE = 200  # characters of what a server says
# The form of RFC 6750. JSON never escapes one of these characters, so a token can be found in it.
_TOKEN = re.compile(r"[\w.~+/-]+=*", re.ASCII)


class ServerError(RuntimeError):
    """The server cannot be reached, failed, or gave an answer of the wrong form.

    Attributes:
      after_s: nothing was done, so the request may be sent again after so many seconds; None: it
        may not.
      remedy: what to do about it; empty for a server that is there and lets us in.
    """

    def __init__(self, message: str, *, after_s: float | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.after_s = after_s
        self.remedy = remedy


@dataclass(kw_only=True, eq=False, repr=False)
class JsonClient:
    """Posts JSON objects and returns the JSON of the answers.

    Raises:
      ValueError: an option is out of range, the variable is unset, the address would show token or
        samples to others, or the packages of the extra `remote` are missing.
    """

    url: str  # https, or http to this machine; without user, query and fragment
    token_env: str | None = None  # the environment variable that holds the bearer token
    ca_file: str | None = None  # certificates (PEM) to trust instead of the system's
    deadline_s: float = 120.0  # of one call, with all of its requests, retries and pauses
    max_attempts: int = 4  # to send one request
    max_pause_s: float = 10.0  # between attempts; random, its range grows from half a second
    max_response_mb: float = 16.0  # a larger answer is cut off and refused
    max_failures: int = 3  # after so many failed calls in a row, calls fail for `cooldown_s`
    cooldown_s: float = 60.0

    def __post_init__(self) -> None:
        check_packages("a reward over HTTP", PACKAGES, "remote")
        for name in ("deadline_s", "max_pause_s", "max_response_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: give a number above 0")
        for name, least in (("max_attempts", 1), ("max_failures", 1), ("cooldown_s", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        _check_url(self.url)
        self._url = self.url.rstrip("/")
        self._token = None if self.token_env is None else read_token(self.token_env)
        self._tls = True if self.ca_file is None else _trusting(self.ca_file)
        self._failures = 0  # failed calls in a row
        self._closed_until = 0.0
        # At their lowest level these loggers print headers, which a server may fill with the token.
        for name in ("httpx2", "httpcore2"):
            logging.getLogger(name).setLevel(logging.WARNING)

    def probe(self, path: str) -> Any:
        """Returns the server's answer to one GET request, which is None if it knows none.

        Raises ValueError if it cannot be reached within some seconds, or refuses the token.
        """
        deadline = min(self.deadline_s, PROBE_S)
        (answer,) = asyncio.run(self._ask_all(path, [None], 1, deadline, attempts=1))
        if not isinstance(answer, ServerError):
            return answer
        if answer.remedy:
            raise ValueError(f"{answer}: {answer.remedy}")
        return None

    def post_each(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, concurrency: int = 1
    ) -> list[Any]:
        """Sends requests as `post_all` does; raises the ServerError of the first that failed."""
        answers = self.post_all(path, bodies, concurrency=concurrency)
        for answer in answers:
            if isinstance(answer, ServerError):
                raise answer
        return answers

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], *, concurrency: int = 1
    ) -> list[Any | ServerError]:
        """Sends several requests; returns the answer to each in order, or why it has none.

        The call counts as failed if no request was answered. After too many failures the server is
        left alone for a while.
        """
        if (left := self._closed_until - time.monotonic()) > 0:
            why = f"left alone for another {left:.0f} s after {self._failures} failures in a row"
            return [ServerError(why)] * len(bodies)
        answers = asyncio.run(
            self._ask_all(path, bodies, concurrency, self.deadline_s, attempts=self.max_attempts)
        )
        failed = bool(answers) and all(isinstance(answer, ServerError) for answer in answers)
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= self.max_failures:
            self._closed_until = time.monotonic() + self.cooldown_s
        return answers

    def without_token(self, text: str) -> str:
        """Returns what a server said in a form that may stand in a message: printable, no token."""
        printable = "".join(character for character in text if character.isprintable())
        return printable if self._token is None else printable.replace(self._token, "***")

    async def _ask_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any] | None],
        concurrency: int,
        deadline_s: float,
        *,
        attempts: int,
    ) -> list[Any | ServerError]:
        """Posts each body; None in place of a body makes a GET request."""
        import httpx2
        from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

        grows = wait_random_exponential(multiplier=0.5, max=self.max_pause_s)

        def is_repeated(error: BaseException) -> bool:
            return isinstance(error, ServerError) and error.after_s is not None

        def pause(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.after_s if isinstance(error, ServerError) else None
            return grows(state) + (asked or 0.0)

        send = retry(
            retry=retry_if_exception(is_repeated),
            stop=stop_after_attempt(attempts),
            wait=pause,
            reraise=True,
        )(self._send)
        turn = asyncio.Semaphore(concurrency)
        end = time.monotonic() + deadline_s
        asyncio.get_running_loop().set_default_executor(_Lookups())

        async def one(body: Mapping[str, Any] | None) -> Any | ServerError:
            try:
                async with asyncio.timeout(end - time.monotonic()), turn:
                    return await send(client, path, body)
            except TimeoutError:
                return ServerError(f"{self._url} gave no answer within deadline_s={deadline_s:g}")
            except ServerError as error:
                return error

        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        async with httpx2.AsyncClient(
            headers=headers,
            verify=self._tls,
            # The deadline ends a request; connecting may take half of it.
            timeout=httpx2.Timeout(None, connect=deadline_s / 2),
            follow_redirects=False,
            # A proxy of the environment would see the samples; .netrc could send other credentials.
            trust_env=False,
        ) as client:
            return await asyncio.gather(*(one(body) for body in bodies))

    async def _send(
        self, client: httpx2.AsyncClient, path: str, body: Mapping[str, Any] | None
    ) -> Any:
        import httpx2

        method = "GET" if body is None else "POST"
        content = bytearray()
        try:
            async with client.stream(method, f"{self._url}{path}", json=body) as response:
                # Raw, since a short compressed answer may become a long one.
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self.max_response_mb * 1e6:
                        limit = f"max_response_mb={self.max_response_mb:g}"
                        raise ServerError(f"{self._url} answered more than {limit}")
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            # Nothing has been sent yet, so the text of the error cannot hold the token.
            kind = type(error).__name__
            raise ServerError(
                f"{self._url} cannot be reached ({kind}: {error})",
                after_s=0.0,
                remedy="start the server first, and check url",
            ) from None
        except (httpx2.HTTPError, ssl.SSLError) as error:
            # The text of the error may hold what the server sent, so only its type is named.
            kind = type(error).__name__
            raise ServerError(f"{self._url} broke off or does not speak HTTP ({kind})") from None
        return self._parsed(response, bytes(content))

    def _parsed(self, response: httpx2.Response, content: bytes) -> Any:
        status = response.status_code
        kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
        if status in BUSY:
            # Retry-After may be a date as well, which would need equal clocks.
            after = response.headers.get("retry-after", "")
            seconds = float(after) if re.fullmatch("[0-9]{1,5}", after) else 0.0
            raise ServerError(f"{self._url} answered {status}", after_s=seconds)
        if status != 200:
            said = self._quoted(content) if kind == "application/json" else ""
            remedy = ""
            if status in NO_ACCESS:
                remedy = "token_env must name the variable with its token"
            raise ServerError(f"{self._url} answered {status}{said}", remedy=remedy)
        if kind != "application/json" or "content-encoding" in response.headers:
            raise ServerError(f"{self._url} answered something else than plain application/json")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            kind = type(error).__name__
            raise ServerError(f"{self._url} answered broken JSON ({kind})") from None

    def _quoted(self, content: bytes) -> str:
        """Returns the server's reason for a refusal: printable, short and without the token."""
        try:
            # ensure_ascii=False: an escape sequence could hide the token from the replacement.
            said = json.dumps(json.loads(content), ensure_ascii=False)
        except (ValueError, RecursionError):
            return ""
        return f": {self.without_token(said)[:_LONGEST_QUOTE]}"


class _Lookups(ThreadPoolExecutor):
    """Runs DNS look-ups. One that hangs cannot be stopped, so nobody waits for it at the end."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def is_loopback(host: str) -> bool:
    """Returns True if a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(name: str) -> str:
    """Returns the bearer token in the environment variable `name`.

    The message of the ValueError without one repeats no name, which may be a token by mistake.
    """
    if not (name.isidentifier() and name.isascii()):
        raise ValueError("token_env must be the name of an environment variable, not a token")
    token = os.environ.get(name, "")
    if not _TOKEN.fullmatch(token):
        raise ValueError("token_env: the environment variable of that name is unset, or no token")
    return token


def _check_url(url: str) -> None:
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError("url must begin with https:// or, to this machine, http:// and a host")
    try:
        _ = address.port  # urlsplit parses the port only here
    except ValueError:
        raise ValueError("url must have a port from 0 to 65535 after the host, or none") from None
    if "@" in address.netloc or address.query or address.fragment:
        raise ValueError("url must have no user, query or fragment: a token goes into token_env")
    if address.scheme == "http" and not is_loopback(address.hostname):
        raise ValueError(
            f"url={url!r} would send samples and token in the clear: use https, or a tunnel to "
            "this machine such as ssh -L 8000:localhost:8000"
        )


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=Path(ca_file).expanduser())
    except OSError as error:
        raise ValueError(f"{ca_file=}: give a file of certificates in PEM ({error})") from error
