"""The views of metrics: a control process and servers that come, go away, come back, and say what they like."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from prometheus_client import generate_latest

from helm_rl.errors import UserError
from helm_rl.runtime.adapters.scripted import ScriptedAdapter
from helm_rl.runtime.counters import Cause, StaleTelemetry
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.monitor import Monitor
from helm_rl.runtime.server import metrics_text
from helm_rl.watch.frame import Frame
from helm_rl.watch.metrics import CONTROL_METRICS, MetricsSource
from tests.helm_rl.runtime.feeds import FakeClock, Recorded, steady


class Page:
    """A server on a port of its own, that says what it is told to; it can go away and come back."""

    def __init__(self) -> None:
        self.text: bytes = b""
        self.port = 0
        self.start()

    def start(self) -> None:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(page.text)))
                self.end_headers()
                self.wfile.write(page.text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page()
    yield made
    made.stop()


def control_text(script: list[Any], **bundle: str) -> bytes:
    """Return what a control process exports after a script, an interval of which is a second."""
    clock = FakeClock(len(script) - 0.999)
    monitor = Monitor(logging.Logger("none"))
    monitor.bundle = bundle or {"policy_sha256": "ab" * 32, "layers": "base"}
    loop = ControlLoop(ScriptedAdapter(script), Recorded(0.6), 1.0, slo_ms=50.0, clock=clock, watch=monitor.watch)
    monitor.attach(loop)
    clock.busy = lambda: not loop._applier.idle
    loop.run(loop._stop)
    return generate_latest(monitor.registry)


def row(frame: Frame, name: str) -> str:
    (found,) = [each.text for each in frame.rows if each.name == name]
    return found


def told(frame: Frame) -> list[str]:
    return [event.text for event in frame.events]


GOOD = [steady(k) for k in range(4)]


def test_a_control_process(page: Page) -> None:
    source = MetricsSource(page.url, 1.0, None, None)
    page.text = control_text(GOOD)
    frame = source.look()
    assert (frame.title, frame.warn, frame.whole) == (f"control process {page.url}", False, True)
    assert row(frame, "alpha applied") == "0.5"  # whatever is asked for, these counters say so
    assert row(frame, "alpha asked for") == "0.6"
    assert row(frame, "P99 ms").endswith(", SLO 50")
    assert float(row(frame, "P99 ms").split(",")[0]) == pytest.approx(20.0, rel=0.02)
    assert [row(frame, name) for name in ("KV hits", "EMB hits", "requests/s", "over the SLO")] == [
        "60.0 %",
        "75.0 %",
        "100",
        "0.0 %",
    ]
    assert [row(frame, name) for name in ("intervals", "missed", "fallbacks")] == ["3 of 1 s", "0", "none"]
    assert row(frame, "bundle") == "abababababab, base"
    assert told(frame) == []

    page.text = control_text([*GOOD, steady(4), steady(5)])
    frame = source.look()
    assert (frame.state, frame.warn) == ("decides", False)
    assert told(frame) == []
    page.text = control_text(
        [*GOOD, steady(4), steady(5), StaleTelemetry("", Cause.LATE), StaleTelemetry("")], policy_sha256="cd"
    )
    frame = source.look()
    assert (frame.state, frame.warn) == ("alpha is left as it is: late 1, unreachable 1", True)
    assert row(frame, "KV hits") == "-"
    assert (
        row(frame, "fallbacks") == row(frame, "readings refused").replace("baseline 1, ", "") == "late 1, unreachable 1"
    )
    assert told(frame) == ["fallbacks: late 1, unreachable 1", "another bundle is in charge: cd, -"]
    (curve,) = [each.curve for each in frame.rows if each.name == "KV hits"]
    assert curve[:2] == (pytest.approx(0.6), pytest.approx(0.6))
    assert curve[2] != curve[2]

    page.text = control_text(GOOD[:3])
    assert told(source.look())[-1] == "the process has started anew"


def test_a_control_process_reads_all_that_one_exports() -> None:
    """But the buckets of its histogram: the view has the mean."""
    names = {line.split("{")[0].split(" ")[0] for line in control_text(GOOD).decode().splitlines() if line[0] != "#"}
    left_out = {"helm_rl_decision_seconds_bucket", "helm_rl_decision_seconds_created"}
    assert names - left_out == CONTROL_METRICS - {"helm_rl_controller_fallbacks_total"}  # whose controller counts none


def test_it_goes_away_and_comes_back(page: Page) -> None:
    source = MetricsSource(page.url, 1.0, None, None)
    page.text = control_text(GOOD)
    source.look()
    page.stop()
    frame = source.look()
    assert frame.warn
    assert frame.state.startswith("nothing to be had for 0 s: ")
    assert row(frame, "alpha applied") == "0.5"  # what was known last
    assert frame.title == f"control process {page.url}"
    source.look()
    assert len(told(source.look())) == 1
    assert told(source.look())[0].startswith("unreachable: GET http://127.0.0.1")
    page.start()
    frame = source.look()
    assert (told(frame)[-1][:13], frame.warn) == ("answers again", False)
    (curve,) = [each.curve for each in frame.rows if each.name == "alpha applied"]
    assert [value == value for value in curve] == [True, False, False, False, False, True]


def test_a_loop_that_stands_still_is_told(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MetricsSource(page.url, 1.0, None, None)
    page.text = control_text(GOOD)
    source.look()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 30.0)
    monkeypatch.setattr("helm_rl.watch.metrics.exchange", lambda *_: page.text)
    frame = source.look()
    assert (frame.state[:18], frame.warn) == ("no interval for 30", True)


def test_a_server_is_measured_between_two_looks(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MetricsSource(page.url, 1.0, None, 10.0)
    seconds = iter([100 * 10**9, 102 * 10**9, 104 * 10**9, 106 * 10**9, 108 * 10**9])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(seconds))
    page.text = metrics_text(steady(0))
    frame = source.look()
    assert (frame.title, frame.whole) == (f"server (helm-rl) {page.url}", False)
    page.text = metrics_text(steady(2, alpha=0.53, history_tokens_hit=90_000.0))
    frame = source.look()
    assert (frame.state, frame.warn, frame.whole) == ("serves", False, True)
    assert [row(frame, name) for name in ("alpha", "KV hits", "EMB hits", "requests/s")] == [
        "0.53",
        "90.0 %",
        "75.0 %",
        "100",
    ]
    assert float(row(frame, "P99 ms").split(",")[0]) == pytest.approx(
        20.0, rel=0.09
    )  # the edges that are exported are 8 % apart
    assert [row(frame, name) for name in ("link busy", "compute busy", "over the SLO")] == [
        "25.0 %",
        "50.0 %",
        "100.0 %",
    ]
    assert [row(frame, name) for name in ("queue", "pages to move")] == ["4 of 512", "8 of 256"]
    page.text = metrics_text(steady(4, alpha=0.7, history_tokens_hit=110_000.0))
    assert told(source.look()) == ["alpha 0.53 -> 0.7"]
    page.text = metrics_text(steady(1))  # it has started anew
    frame = source.look()
    assert (frame.state, frame.warn) == ("not believed: backwards", True)
    page.text = metrics_text(steady(3))
    frame = source.look()
    assert frame.state == "serves"
    assert told(frame)[1:] == ["a reading is refused: backwards", "its counters began anew", "alpha 0.7 -> 0.5"]


VLLM = """\
vllm:request_success_total{finished_reason="stop"} %d
vllm:prefix_cache_queries_total 1000
vllm:prefix_cache_hits_total 500
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 5
vllm:num_requests_waiting 3
"""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (VLLM % 10, "server (vllm)"),
        (
            "nv_inference_request_success 5\n"
            "nv_inference_compute_infer_duration_us 7\n"
            "nv_inference_pending_request_count 1\n",
            "server (triton)",
        ),
    ],
)
def test_other_servers_are_told_by_what_they_export(page: Page, text: str, what: str) -> None:
    page.text = text.encode()
    assert MetricsSource(page.url, 1.0, None, None).look().title == f"{what} {page.url}"


def test_what_is_neither_says_so(page: Page) -> None:
    page.text = b"go_goroutines 7\n"
    frame = MetricsSource(page.url, 1.0, None, None).look()
    assert (frame.rows, frame.whole) == ((), False)
    assert (
        "answers, but neither a control process nor a server that one of the mappings helm-rl, triton, vllm"
        in frame.state
    )
    named = MetricsSource(page.url, 1.0, "vllm", None).look().state
    assert named.endswith("there is no vllm:request_success_total")


HOSTILE = [
    b"\xff\xfe",
    b"helm_rl_intervals_total 5",  # breaks off
    b"helm_rl_intervals_total nonsense\n",
    b"helm_rl_intervals_total 1\nhelm_rl_intervals_total 1\n",
    b"helm_rl_intervals_total{" + b"a" * 100_000 + b"} 1\n",
    b'helm_rl_intervals_total 1\nhelm_rl_alpha_asked{x="\x1b[2J"\n',
    b"helm_rl_intervals_total 1\n" + b"".join(b'helm_rl_fallbacks_total{cause="%d"} 1\n' % k for k in range(30_000)),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_that_cannot_be_read_is_told_in_a_line(page: Page, text: bytes) -> None:
    page.text = text
    source = MetricsSource(page.url, 1.0, None, None)
    frame = source.look()
    assert frame.state.startswith("nothing to be had")
    assert len(frame.state) < 500
    page.text = control_text(GOOD)
    assert row(source.look(), "intervals") == "3 of 1 s"


def test_values_that_cannot_be_are_shown_as_none_or_as_they_are(page: Page) -> None:
    lines = [
        "helm_rl_intervals_total 1e308",
        "helm_rl_alpha_asked NaN",
        "helm_rl_alpha_applied +Inf",
        "helm_rl_p99_ms -1e300",
        "helm_rl_slo_ms 0",
        "helm_rl_kv_hit_ratio 1e300",
        "helm_rl_decision_seconds_count 0",
        'helm_rl_fallbacks_total{cause="\\x1b[2J' + "c" * 3_000 + '"} 7',
        "helm_rl_fallbacks_total{} 8",
        'helm_rl_masked{feature="' + "f" * 3_000 + '"} 1',
    ]
    page.text = ("\n".join(lines) + "\n").encode()
    source = MetricsSource(page.url, 1.0, None, None)
    frame = source.look()
    assert [row(frame, f"alpha {what}") for what in ("applied", "asked for")] == ["-", "-"]
    assert row(frame, "intervals") == "1e+308 of - s"
    assert "? 8" in row(frame, "fallbacks")
    assert max(len(each.text) for each in frame.rows) < 200
    page.text = page.text.replace(b"} 7", b"} 1e308").replace(b"1e308\nhelm_rl_alpha_asked", b"0\nhelm_rl_alpha_asked")
    assert told(source.look()) == ["the process has started anew"]


@pytest.mark.parametrize("url", ["https://a:1", "http://", "http://a:b", "http://u@a", "ftp://a", "http://a /x"])
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(UserError):
        MetricsSource(url, 1.0, None, None)
