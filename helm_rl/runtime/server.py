"""Hooks for a control loop elsewhere: an adapter's counters as Prometheus text, its target taken as JSON, over HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from helm_rl.runtime.counters import MONOTONE, Adapter, Counters, Latencies, StaleTelemetry
from helm_rl.runtime.mapping import load_mapping

_MOST_BODY = 4_096
_TIMEOUT_S = 5.0
_MOST_REQUEST_S = 10.0  # from when one is waited for until it is answered
_MOST_EDGES = 200  # the sketch's bins, eight by eight: 8 % a bucket


class HookServer:
    """Serves GET /metrics and POST /target for an adapter, on threads of its own, until it is closed.

    The metrics are those of the shipped mapping `helm-rl`: on the other side an `HttpAdapter` with that mapping sees
    what the adapter here sees. A target that is no JSON of a finite alpha and a revision is refused with status 400;
    what the adapter raises as StaleTelemetry is answered with 503.

    Args:
        adapter: what is served; its `read` and `apply` are called by one thread at a time each.
        host, port: where to listen; port 0: any that is free.
    """

    def __init__(self, adapter: Adapter, host: str = "127.0.0.1", port: int = 0) -> None:
        reading, applying = threading.Lock(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                """Answer, or hang up on who asks a byte at a time, for whom `timeout` begins anew with each."""
                hang_up = threading.Timer(_MOST_REQUEST_S, self._hang_up)
                hang_up.daemon = True
                hang_up.start()
                try:
                    super().handle_one_request()
                finally:
                    hang_up.cancel()

            def _hang_up(self) -> None:
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._call(reading, lambda: metrics_text(adapter.read()))
                else:
                    self._answer(HTTPStatus.NOT_FOUND, b"")

            def do_POST(self) -> None:
                target = self._target()
                if self.path != "/target":
                    self._answer(HTTPStatus.NOT_FOUND, b"")
                elif target is None:
                    self._answer(HTTPStatus.BAD_REQUEST, b'expected JSON, {"alpha": .42, "revision": 17}')
                else:
                    alpha, revision = target
                    self._call(applying, lambda: json.dumps({"alpha": adapter.apply(alpha, revision)}).encode())

            def _call(self, lock: threading.Lock, answer: Callable[[], bytes]) -> None:
                try:
                    with lock:
                        body = answer()
                except StaleTelemetry as error:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())
                else:
                    self._answer(HTTPStatus.OK, body)

            def _target(self) -> tuple[float, int] | None:
                """Return the body's alpha and revision; a page in a browser cannot send this type of content."""
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or len(length) > 9 or int(length) > _MOST_BODY:
                    self.close_connection = True  # for the body is not read
                    return None
                text = self.rfile.read(int(length))
                if self.headers.get_content_type() != "application/json":
                    return None
                try:
                    body: Any = json.loads(text)
                    alpha, revision = float(body["alpha"]), body["revision"]
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    return None
                sound = math.isfinite(alpha) and type(revision) is int and 0 <= revision < 2**62
                return (alpha, revision) if sound else None

            def _answer(self, status: HTTPStatus, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a scrape a second is no news."""

        self._server = QuietServer((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="helm-hooks", args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class QuietServer(ThreadingHTTPServer):
    """A server that says nothing of clients who have gone before they had their answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over what the connection raised; anything else is a fault of ours, and is printed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Once:
    """Collects the metrics of one reading."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, signal in load_mapping("helm-rl").signals.items():
            value = getattr(self._counters, name)
            assert signal.metric is not None
            if value is None:
                continue
            if name == "latency":
                yield _histogram(value, signal.metric, signal.scale)
            else:
                kind = CounterMetricFamily if name in MONOTONE else GaugeMetricFamily
                yield kind(signal.metric.removesuffix("_total"), name, value=value)


def metrics_text(counters: Counters) -> bytes:
    """Return the Prometheus text that the mapping `helm-rl` reads back as these counters."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(counters))
    return generate_latest(registry)


def _histogram(given: Latencies, name: str, scale: float) -> Metric:
    """Return a histogram of at most _MOST_EDGES buckets: of finer ones, several are put together."""
    n = given.edges_ms.size
    every = -(-n // _MOST_EDGES)
    at = np.unique(np.append(np.arange(every - 1, n, every), n - 1))
    below = np.cumsum(given.requests)
    buckets = [
        (repr(edge), count) for edge, count in zip((given.edges_ms[at] / scale).tolist(), below[at], strict=True)
    ]
    if given.edges_ms[-1] == math.inf:
        buckets.pop()
    return HistogramMetricFamily(name, "latency", buckets=[*buckets, ("+Inf", float(below[-1]))], sum_value=None)
