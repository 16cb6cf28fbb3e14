"""A proxy between a control process and its server, which does to each answer what a script says."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from eval.control.faults import END, EVENTS, FAULTS, HUGE_BYTES, Values, tampered
from helm_rl.runtime.server import QuietServer

_UPSTREAM_S = 5.0
_DRIPS = 200
_TARGETS = {fault.name for fault in FAULTS if fault.cause is None}


class FaultProxy:
    """Listens on loopback until it is closed.

    Args:
        upstream: the server's URL.
        script: for each answer to GET /metrics a fault's name, an event's, or None.
        late_s: how long an answer takes that is late.

    Attributes:
        injected: faults by their names.
        events: names of events, and END, as their turn comes; the answer itself is sound.
    """

    def __init__(self, upstream: str, script: Iterator[str | None], late_s: float) -> None:
        self.injected: Counter[str] = Counter()
        self.events: queue.Queue[str] = queue.Queue()
        self._upstream = upstream
        self._script = script
        self._late_s = late_s
        self._lock = threading.Lock()
        self._began: Values = {}  # counters where the server seems to have begun anew
        self._last = b""
        self._targets: list[str] = []  # faults of the next targets
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._get(self)

            def do_POST(self) -> None:
                proxy._post(self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _get(self, asked: BaseHTTPRequestHandler) -> None:
        with self._lock:
            fault = next(self._script)
            if fault in EVENTS or fault == END:
                assert fault is not None
                self.events.put(fault)
                fault = None
            elif fault in _TARGETS:
                self._targets.append(fault)
                fault = None
            elif fault is not None:
                self.injected[fault] += 1
        body = self._answer(fault)
        if fault == "error":
            _reply(asked, HTTPStatus.INTERNAL_SERVER_ERROR, body)
        elif fault == "redirect":
            _reply(asked, HTTPStatus.FOUND, b"", Location="file:///etc/passwd")
        elif fault == "hung_up":
            asked.close_connection = True
        elif fault == "cut_off":
            _reply(asked, HTTPStatus.OK, body[: len(body) // 2], length=len(body))
        elif fault == "dripping":
            _drip(asked, self._late_s)
        else:
            if fault == "late":
                time.sleep(self._late_s)
            _reply(asked, HTTPStatus.OK, body)

    def _answer(self, fault: str | None) -> bytes:
        """Return the server's metrics after what the fault does to them."""
        if fault == "garbage":
            return bytes(range(256)) * 64
        if fault == "huge":
            return b"x" * HUGE_BYTES
        if fault == "frozen":
            return self._last
        with urllib.request.urlopen(f"{self._upstream}/metrics", timeout=_UPSTREAM_S) as answer:
            lines = answer.read().decode("utf-8").splitlines()
        values: Values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        if fault == "reset":
            self._began = {key: value for key, value in values.items() if "_total" in key or "_bucket" in key}
        for key, value in self._began.items():
            values[key] = repr(float(values[key]) - float(value))
        if fault is not None:
            values = tampered(fault, values)
        body = "".join(f"{key} {value}\n" for key, value in values.items()).encode()
        if fault is None:
            self._last = body
        return body

    def _post(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers["Content-Length"]))
        with self._lock:
            fault = self._targets.pop(0) if self._targets else None
            if fault is not None:
                self.injected[fault] += 1
        if fault == "target_error":
            _reply(asked, HTTPStatus.INTERNAL_SERVER_ERROR, b"")
            return
        if fault == "target_nan":
            _reply(asked, HTTPStatus.OK, json.dumps({"alpha": float("nan")}).encode())
            return
        if fault == "target_late":
            time.sleep(self._late_s)
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._upstream}/target", body, headers)
        with urllib.request.urlopen(request, timeout=_UPSTREAM_S) as answer:
            _reply(asked, HTTPStatus.OK, answer.read())


def _reply(
    asked: BaseHTTPRequestHandler, status: HTTPStatus, body: bytes, length: int | None = None, **headers: str
) -> None:
    asked.send_response(status)
    asked.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        asked.send_header(name, value)
    asked.end_headers()
    asked.wfile.write(body)
    if length is not None:
        asked.close_connection = True


def _drip(asked: BaseHTTPRequestHandler, seconds: float) -> None:
    """Send a header byte by byte, so that something always comes."""
    asked.close_connection = True
    asked.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(_DRIPS):
        asked.wfile.write(b"a")
        asked.wfile.flush()
        time.sleep(seconds / _DRIPS)
