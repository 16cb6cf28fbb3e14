"""A server over HTTP: what is read and set through it, and that no answer of any kind holds the reader up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helm_rl.errors import UserError
from helm_rl.runtime.adapters.http import MOST_BYTES, Endpoint, HttpAdapter
from helm_rl.runtime.adapters.scripted import ScriptedAdapter
from helm_rl.runtime.counters import Cause, StaleTelemetry
from helm_rl.runtime.mapping import load_mapping
from helm_rl.runtime.server import HookServer, metrics_text
from tests.helm_rl.runtime.feeds import spoilt, steady

OURS = load_mapping("helm-rl")
GOOD = metrics_text(steady(3))


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Give a function that starts a server, which hands each connection to `answer` after its request has come."""
    listeners: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def work() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    connection.recv(65536)
                    with contextlib.suppress(OSError):
                        answer(connection)

        threading.Thread(target=work, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def saying(status: str, body: bytes, **headers: str) -> Callable[[socket.socket], None]:
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = f"HTTP/1.1 {status}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    return lambda connection: connection.sendall(head.encode() + body)


def cause_of(call: Callable[[], Any]) -> Cause:
    with pytest.raises(StaleTelemetry) as caught:
        call()
    assert len(str(caught.value)) < 400
    return caught.value.cause


def test_counters_and_targets_go_through() -> None:
    inside = ScriptedAdapter([steady(3), StaleTelemetry("down"), steady(5, rows=None)])
    server = HookServer(inside)
    outside = HttpAdapter(server.url, OURS)
    assert spoilt(outside.read(), latency=None) == spoilt(steady(3), latency=None)
    assert cause_of(outside.read) is Cause.UNREACHABLE  # answered with 503
    assert cause_of(outside.read) is Cause.MISSING
    assert outside.apply(0.375, 2**53 + 1) == 0.375
    assert inside.applied == [(0.375, 2**53 + 1)]
    server.close()
    assert cause_of(outside.read) is Cause.UNREACHABLE
    assert cause_of(lambda: outside.apply(0.5, 1)) is Cause.UNREACHABLE


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (saying("500 Internal Server Error", GOOD), Cause.UNREACHABLE),
        (saying("302 Found", b"", Location="file:///etc/passwd"), Cause.UNREACHABLE),
        (saying("200 OK", b"\xff\xfe"), Cause.MALFORMED),
        (saying("200 OK", b""), Cause.MISSING),
        (saying("200 OK", GOOD, Content_Length=str(len(GOOD) + 10)), Cause.MALFORMED),
        (saying("200 OK", b"x" * (MOST_BYTES + 1)), Cause.MALFORMED),
        (saying("200 OK", GOOD, Transfer_Encoding="chunked"), Cause.UNREACHABLE),
        (saying("200 OK", GOOD, **{f"X{k}": "y" for k in range(200)}), Cause.UNREACHABLE),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"), Cause.UNREACHABLE),
        (lambda connection: connection.sendall(b"\x00" * 100_000), Cause.UNREACHABLE),
        (lambda connection: None, Cause.UNREACHABLE),
    ],
)
def test_an_answer_that_is_none_is_told_by_its_cause(serve: Any, answer: Any, cause: Cause) -> None:
    adapter = HttpAdapter(serve(answer), OURS, timeout_s=5.0)
    assert cause_of(adapter.read) is cause


def drip(connection: socket.socket) -> None:
    """Send a header byte by byte, each of which a timeout of its own would wait for."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(200):
        connection.sendall(b"a")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"helm_rl_engine_rows_total 1\n" * 10_000)


@pytest.mark.parametrize(
    ("answer", "cause"), [(drip, Cause.LATE), (lambda c: time.sleep(3), Cause.LATE), (flood, Cause.MALFORMED)]
)
def test_no_answer_takes_longer_than_it_may(serve: Any, answer: Any, cause: Cause) -> None:
    adapter = HttpAdapter(serve(answer), OURS, timeout_s=0.4)
    begun = time.monotonic()
    assert cause_of(adapter.read) is cause
    assert time.monotonic() - begun < 2.0


def test_no_answer_fills_the_memory(serve: Any) -> None:
    sent: list[int] = []

    def chunk_without_end(connection: socket.socket) -> None:
        """Announce a chunk of -1 bytes, which http.client takes for all that is still to come."""
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n")
        for _ in range(64):
            connection.sendall(b"x" * (1 << 20))
            sent.append(1 << 20)

    adapter = HttpAdapter(serve(chunk_without_end), OURS, timeout_s=20.0)
    assert cause_of(adapter.read) is Cause.MALFORMED
    assert sum(sent) < 4 * MOST_BYTES


def test_an_error_without_words_is_told_by_its_name(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(socket.socket, "recv_into", reset)
    with pytest.raises(StaleTelemetry, match=r"ConnectionResetError$"):
        HttpAdapter(serve(lambda _: None), OURS).read()


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b'{"alpha": NaN}', Cause.ABSURD),
        (b'{"alpha": 7}', Cause.ABSURD),
        (b'{"alpha": -0.1}', Cause.ABSURD),
        (b'{"alpha": 1' + b"0" * 400 + b"}", Cause.MALFORMED),
        (b'{"alpha": "high"}', Cause.MALFORMED),
        (b'{"beta": 0.5}', Cause.MALFORMED),
        (b"[" * 50_000, Cause.MALFORMED),
        (b"0.5", Cause.MALFORMED),
        (b"ok", Cause.MALFORMED),
        (b" " * 70_000, Cause.MALFORMED),
    ],
)
def test_answers_to_a_target(serve: Any, body: bytes, cause: Cause) -> None:
    adapter = HttpAdapter("http://127.0.0.1:1", OURS, target_url=serve(saying("200 OK", body)), timeout_s=5.0)
    assert cause_of(lambda: adapter.apply(0.5, 1)) is cause


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:9000", ("127.0.0.1", 9000, "/metrics")),
        ("http://[::1]:9000/", ("::1", 9000, "/metrics")),
        ("http://gpu-7/own/metrics?part=a", ("gpu-7", 80, "/own/metrics?part=a")),
    ],
)
def test_urls(url: str, endpoint: tuple[str, int, str]) -> None:
    assert tuple(Endpoint.parse(url, "/metrics")) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:9000",
        "file:///etc/passwd",
        "https://a",
        "http://",
        "http://a:99999",
        "http://u:p@a",
        "http://a/b c",
        "http://a\r\nb",
        "http://[::1",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UserError):
        HttpAdapter(url, OURS)


def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = HookServer(ScriptedAdapter([steady(3)]))
    assert HttpAdapter(server.url, OURS).read().arrivals == 300
    server.close()


# The hooks themselves


def post(url: str, body: bytes, kind: str = "application/json") -> int:
    request = urllib.request.Request(f"{url}/target", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"alpha": 0.5, "revision": 1}', "text/plain"),  # what a form in a browser could send
        (b'{"alpha": NaN, "revision": 1}', "application/json"),
        (b'{"alpha": 1e999, "revision": 1}', "application/json"),
        (b'{"alpha": 0.5}', "application/json"),
        (b'{"alpha": 0.5, "revision": 1.5}', "application/json"),
        (b'{"alpha": 0.5, "revision": -1}', "application/json"),
        (b'{"alpha": 0.5, "revision": true}', "application/json"),
        (b'{"alpha": 0.5, "revision": 1}' + b" " * 5_000, "application/json"),
        (b"[1, 2]", "application/json"),
        (b"", "application/json"),
    ],
)
def test_a_target_that_is_none_is_refused(body: bytes, kind: str) -> None:
    inside = ScriptedAdapter([])
    server = HookServer(inside)
    assert post(server.url, body, kind) == 400
    assert inside.applied == []
    assert post(server.url, b'{"alpha": 0.5, "revision": 3}') == 200
    assert inside.applied == [(0.5, 3)]
    server.close()


def test_there_is_nothing_else_to_be_had() -> None:
    server = HookServer(ScriptedAdapter([]))
    for path in ("/", "/metrics/../x", "/target"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server.url + path, timeout=5)
        assert caught.value.code == 404
    server.close()
