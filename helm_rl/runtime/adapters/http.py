"""A server over HTTP: counters scraped from Prometheus text, targets POSTed as JSON."""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from helm_rl.errors import UserError
from helm_rl.runtime.adapters.prometheus import reader
from helm_rl.runtime.counters import Cause, Counters, StaleTelemetry
from helm_rl.runtime.mapping import Mapping

MOST_BYTES = 4 << 20
"""Of an answer; more is refused before it is read."""
_MOST_ANSWER_BYTES = 64 << 10  # to a target
_MOST_BESIDE_BYTES = 1 << 20  # the header, and what divides a body into chunks


class Endpoint(NamedTuple):
    """Where something is asked for over HTTP."""

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str, path: str) -> Endpoint:
        """Read a URL, http://HOST[:PORT][/PATH]; without a path it has `path`. UserError says what is wrong."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"{url!r} is no URL: {error}") from None
        if parts.scheme != "http" or not host:
            raise UserError(f"{url!r} must be http://HOST:PORT or http://HOST:PORT/PATH; TLS is a proxy's task")
        if parts.username is not None or parts.fragment:
            raise UserError(f"{url!r} must have neither a user nor a fragment")
        if not url.isascii() or not url.isprintable() or " " in url:
            raise UserError(f"{url!r} must be plain ASCII without spaces")
        asked = parts.path if parts.path not in ("", "/") else path
        return cls(host, 80 if port is None else port, f"{asked}?{parts.query}" if parts.query else asked)


class HttpAdapter:
    """A server that exports Prometheus text and takes targets as JSON.

    Targets go as `{"alpha": .42, "revision": 17}` and come back as `{"alpha": .4}`, what is applied by then. Nothing
    else is followed: no redirection, no proxy of the environment; an answer that is larger than MOST_BYTES, or has not
    come whole in time, is none.

    Args:
        url: of the metrics; without a path /metrics is asked for.
        mapping: which metric each signal is.
        target_url: where targets go; None: the same host, /target.
        timeout_s: for a whole exchange.
        period_s: as `Adapter.period_s`.

    Raises:
        UserError: a URL is none that can be used.
    """

    def __init__(
        self,
        url: str,
        mapping: Mapping,
        *,
        target_url: str | None = None,
        timeout_s: float = 1.0,
        period_s: float = math.inf,
    ) -> None:
        if not 0.0 < timeout_s < math.inf:
            raise UserError(f"timeout_s must be a number of seconds above 0, not {timeout_s!r}")
        self.period_s = period_s
        self._metrics = Endpoint.parse(url, "/metrics")
        same_host = self._metrics._replace(path="/target")
        self._target = same_host if target_url is None else Endpoint.parse(target_url, "/target")
        self._counters = reader(mapping)
        self._timeout_s = timeout_s

    def read(self) -> Counters:
        """Scrape the metrics."""
        data = exchange("GET", self._metrics, None, self._timeout_s, MOST_BYTES)
        try:
            return self._counters(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise StaleTelemetry("the metrics are not UTF-8 text", Cause.MALFORMED) from None

    def apply(self, alpha: float, revision: int) -> float:
        """POST a target; return what the server says is applied."""
        body = json.dumps({"alpha": alpha, "revision": revision}).encode("ascii")
        data = exchange("POST", self._target, body, self._timeout_s, _MOST_ANSWER_BYTES)
        try:
            answer: Any = json.loads(data)
            applied = float(answer["alpha"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise StaleTelemetry("the answer to a target has no alpha", Cause.MALFORMED) from None
        if not 0.0 <= applied <= 1.0:
            raise StaleTelemetry(f"the answer to a target has alpha {applied}", Cause.ABSURD)
        return applied


def exchange(method: str, to: Endpoint, body: bytes | None, timeout_s: float, most_bytes: int) -> bytes:
    """Ask, and return the body of the answer, which must be whole in time and no larger than `most_bytes`.

    StaleTelemetry says what is wrong with it, or that there is none.
    """
    where = f"{method} http://{to.host}:{to.port}{to.path}"
    deadline_s = time.monotonic() + timeout_s
    connection = _BoundedConnection(to.host, to.port, deadline_s, most_bytes + _MOST_BESIDE_BYTES)
    try:
        headers = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
        connection.request(method, to.path, body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise StaleTelemetry(f"{where} answers {response.status} {response.reason[:60]}")
        data = response.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise _TooMuchError
        if response.length:
            raise StaleTelemetry(f"{where} broke off its answer", Cause.MALFORMED)
        return data
    except _TooMuchError:
        raise StaleTelemetry(f"{where} answers more than {most_bytes} bytes", Cause.MALFORMED) from None
    except TimeoutError:
        raise StaleTelemetry(f"{where} has not answered in {timeout_s:g} s", Cause.LATE) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of headers that are none
        raise StaleTelemetry(f"{where}: {str(error) or type(error).__name__}"[:300]) from None
    finally:
        connection.close()


class _TooMuchError(Exception):
    """An answer is larger than it may be."""


class _BoundedConnection(http.client.HTTPConnection):
    """A connection that is over at a time of the monotonic clock, however slowly an answer drips in.

    It takes no more than so many bytes: to a chunk of -1 bytes http.client would listen until the memory is full.
    """

    def __init__(self, host: str, port: int, deadline_s: float, most_bytes: int) -> None:
        super().__init__(host, port)
        self._deadline_s = deadline_s
        self._most_bytes = most_bytes

    def connect(self) -> None:
        """Connect to the first of the host's addresses that answers."""
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            made = _BoundedSocket(family, kind, protocol)
            made.deadline_s, made.left_bytes = self._deadline_s, self._most_bytes
            try:
                made.settimeout(made.left_s())
                made.connect(address)
            except OSError as failed:
                made.close()
                error = failed
                continue
            self.sock = made
            return
        raise error or OSError(f"{self.host} has no address")


class _BoundedSocket(socket.socket):
    deadline_s = math.inf
    left_bytes = 0

    def left_s(self) -> float:
        """Return the seconds that are left; TimeoutError where there are none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def recv_into(self, *arguments: Any) -> int:
        """Wait no longer than is left, and take no more."""
        self.settimeout(self.left_s())
        received = super().recv_into(*arguments)
        self.left_bytes -= received
        if self.left_bytes < 0:
            raise _TooMuchError
        return received

    def sendall(self, *arguments: Any) -> None:
        """Wait no longer than is left."""
        self.settimeout(self.left_s())
        super().sendall(*arguments)
