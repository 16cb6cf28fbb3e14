"""`helm-rl control`: its whole life as a process, what it says of itself, and what it refuses to start with."""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import math
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from helm_rl import cli
from helm_rl.checkpoint import load_bundle
from helm_rl.observation import OBSERVATION_NAMES
from helm_rl.runtime.adapters.scripted import Line, ScriptedAdapter
from helm_rl.runtime.command import DryRun, _Quiet
from helm_rl.runtime.counters import Cause, StaleTelemetry
from helm_rl.runtime.journal import journal
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.monitor import Monitor
from helm_rl.runtime.server import HookServer
from helm_rl.runtime.signals import Signals
from helm_rl.runtime.steering import steering_of
from tests.helm_rl.runtime.feeds import FakeClock, Recorded, Serving, make_bundle_at, steady

INTERVAL_S = 0.4
SYS_TGKILL = 234  # x86-64


class Process:
    """A control process, whose lines of JSON are read as they come."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "helm_rl.cli", "control", *arguments]
        self.running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def event(self, name: str) -> dict[str, Any]:
        """Return the next line of this event; a process that ends without one fails the test."""
        assert self.running.stderr is not None
        for line in self.running.stderr:
            said = json.loads(line)
            if said["event"] == name:
                return dict(said)
        raise AssertionError(f"it ended, with status {self.running.wait()}, and never said {name}")

    def metrics(self, url: str) -> dict[str, float]:
        with urllib.request.urlopen(url, timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return {
                ",".join((sample.name, *sample.labels.values())): sample.value
                for family in families
                for sample in family.samples
            }


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def one(*arguments: str) -> Process:
        made.append(Process(*arguments))
        return made[-1]

    yield one
    for process in made:
        process.running.kill()
        process.running.communicate()


def until(truth: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_the_whole_life_of_a_control_process(start: Callable[..., Process], tmp_path: Path) -> None:
    """It decides, takes another bundle, keeps it when the next one is bad, and leaves alpha where it is."""
    serving = Serving()
    server = HookServer(serving)
    bundle = tmp_path / "bundle"
    first = make_bundle_at(bundle, INTERVAL_S)
    process = start(str(bundle), "--url", server.url, "--slo-ms", "50", "--listen", "127.0.0.1:0")
    told = process.event("start")
    assert told["level"] == "info"
    assert told["interval_s"] == INTERVAL_S
    assert told["policy_sha256"] == first.files["policy.safetensors"]
    assert told["metrics"].startswith("http://127.0.0.1:")
    until(lambda: len(serving.targets) >= 3)

    second = make_bundle_at(bundle, INTERVAL_S, seed=1, overwrite=True)
    process.running.send_signal(signal.SIGHUP)
    told_again = process.event("reload")
    assert (told_again["result"], told_again["policy_sha256"]) == ("ok", second.files["policy.safetensors"])
    (bundle / "policy.safetensors").write_bytes(b"rubbish")
    process.running.send_signal(signal.SIGHUP)
    bad = process.event("reload")
    assert (bad["result"], bad["level"]) == ("bad", "error")
    assert "policy.safetensors: its sha256 is" in bad["detail"]
    decided = len(serving.targets)
    until(lambda: len(serving.targets) >= decided + 2)

    metrics = process.metrics(told["metrics"])
    assert metrics["helm_rl_intervals_missed_total"] == 0
    assert metrics["helm_rl_decisions_total"] >= decided
    assert metrics["helm_rl_bundle_reloads_total,ok"] == metrics["helm_rl_bundle_reloads_total,bad"] == 1
    assert metrics[f"helm_rl_bundle_info,base,{second.files['policy.safetensors']}"] == 1
    assert metrics["helm_rl_decision_seconds_count"] == metrics["helm_rl_intervals_total"]
    assert 0.15 <= metrics["helm_rl_alpha_asked"] <= 0.85
    fallbacks = {name for name, value in metrics.items() if name.startswith("helm_rl_fallbacks_total,") and value}
    assert fallbacks <= {"helm_rl_fallbacks_total,late"}  # a machine may be slow
    assert {f"helm_rl_masked,{name}" for name in OBSERVATION_NAMES} <= metrics.keys()

    process.running.send_signal(signal.SIGTERM)
    assert process.event("signal")["name"] == "SIGTERM"
    assert process.event("stop")["alpha"] == pytest.approx(serving.alpha, abs=0.03)
    assert process.running.wait(10) == 0
    assert process.running.stdout is not None
    assert process.running.stdout.read() == ""
    targets = list(serving.targets)
    assert all(0.15 <= alpha <= 0.85 for alpha, _ in targets)
    assert [revision for _, revision in targets] == sorted({revision for _, revision in targets})
    time.sleep(2 * INTERVAL_S)
    assert serving.targets == targets
    server.close()


def test_it_waits_for_a_server_that_is_not_there_and_ends_when_asked(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    make_bundle_at(tmp_path / "bundle", 0.1)
    process = start(
        str(tmp_path / "bundle"), "--url", f"http://127.0.0.1:{port}", "--slo-ms", "50", "--listen", "127.0.0.1:0"
    )
    assert process.event("fallback")["cause"] == "unreachable"
    process.running.send_signal(signal.SIGINT)
    assert process.event("stop")["alpha"] is None
    assert process.running.wait(10) == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_no_signal_kills_it_whichever_thread_it_comes_to(start: Callable[..., Process], tmp_path: Path) -> None:
    """Threads of NumPy's libraries block none, and the system may hand a signal to any of them."""
    make_bundle_at(tmp_path / "bundle", 0.1)
    process = start(
        str(tmp_path / "bundle"), "--url", "http://127.0.0.1:9", "--slo-ms", "50", "--listen", "127.0.0.1:0"
    )
    process.event("start")
    threads = [int(task.name) for task in Path(f"/proc/{process.running.pid}/task").iterdir()]
    assert len(threads) >= 4
    send = ctypes.CDLL(None, use_errno=True).syscall
    for thread in threads:
        assert send(SYS_TGKILL, process.running.pid, thread, int(signal.SIGHUP)) == 0
        assert process.event("reload")["result"] == "ok"
    process.running.send_signal(signal.SIGTERM)
    assert process.running.wait(10) == 0


def test_neither_a_pipe_that_nobody_reads_nor_a_client_of_its_metrics_holds_it_up(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    serving = Serving()
    server = HookServer(serving)
    make_bundle_at(tmp_path / "bundle", 0.1)
    process = start(str(tmp_path / "bundle"), "--url", server.url, "--slo-ms", "50", "--listen", "127.0.0.1:0")
    url = process.event("start")["metrics"]
    assert process.running.stderr is not None
    fcntl.fcntl(process.running.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4_096)

    reloaded = 0.0
    while reloaded < 40:  # each a line of 200 bytes
        process.running.send_signal(signal.SIGHUP)
        before = reloaded
        while reloaded == before:
            reloaded = process.metrics(url)["helm_rl_bundle_reloads_total,ok"]

    address = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    idle = [socket.create_connection(address) for _ in range(40)]
    for request in (b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=a\r\n\r\n", b"\0\r\n\r\n"):
        for _ in range(5):
            with socket.create_connection(address) as client:
                client.sendall(request)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset at once
    decided = len(serving.targets)
    until(lambda: len(serving.targets) >= decided + 5)
    for client in idle:
        client.close()

    process.running.send_signal(signal.SIGTERM)
    assert process.running.wait(10) == 0
    lines = process.running.stderr.read().splitlines()
    assert len(lines) > 15
    for line in lines[:-1]:  # the pipe broke off in the last one
        assert json.loads(line)["event"]
    server.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_second_signal_kills_it_while_it_ends(
    number: signal.Signals, start: Callable[..., Process], tmp_path: Path
) -> None:
    make_bundle_at(tmp_path / "bundle", 0.1)
    process = start(
        str(tmp_path / "bundle"), "--url", "http://127.0.0.1:9", "--slo-ms", "50", "--listen", "127.0.0.1:0"
    )
    process.event("start")
    process.running.send_signal(signal.SIGTERM)
    end = time.monotonic() + 60
    while process.running.poll() is None and time.monotonic() < end:
        process.running.send_signal(number)
        time.sleep(0.002)
    assert process.running.returncode == 0


def test_whoever_asks_for_its_metrics_byte_by_byte_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Quiet, "timeout", 0.5)
    registry = CollectorRegistry()
    server, _ = start_http_server(0, "127.0.0.1", registry)
    server.RequestHandlerClass = _Quiet
    try:
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.settimeout(0.1)
            begun, answer = time.monotonic(), None
            while answer is None and time.monotonic() - begun < 20:
                try:
                    client.sendall(b"G")
                    answer = client.recv(1)
                except TimeoutError:  # it listens still
                    continue
                except OSError:
                    answer = b""
        assert answer == b""
    finally:
        server.shutdown()
        server.server_close()


def test_in_a_storm_of_signals_none_of_another_kind_is_lost() -> None:
    with Signals() as signals:
        for _ in range(5_000):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert signals.wait(5.0) == {signal.SIGHUP, signal.SIGTERM}
        assert signals.wait(0.01) == set()


def test_its_mistakes_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_bundle_at(tmp_path / "bundle", INTERVAL_S)
    taken = socket.create_server(("127.0.0.1", 0))
    good = {"--url": "http://127.0.0.1:9", "--slo-ms": "50", "--listen": "127.0.0.1:0"}
    for options, said in (
        ({"--url": "https://a"}, "'https://a' must be http://HOST:PORT"),
        ({"--slo-ms": "-1"}, "slo_ms must be a number above 0, not -1.0"),
        ({"--listen": "9464"}, "--listen must be HOST:PORT"),
        ({"--listen": "a..b:9464"}, "--listen a..b:9464: "),
        ({"--listen": f"127.0.0.1:{taken.getsockname()[1]}"}, "Address already in use"),
        ({"--mapping": "vlm"}, "vlm is neither a shipped mapping"),
        ({"--mapping": "vllm"}, "--mapping vllm: such a server takes no targets"),
        ({"--interval-s": "2"}, "the policy was trained for 0.4 s between decisions, and 2 s was asked for"),
        ({"--interval-s": "0"}, "0 s was asked for"),
        ({"--read-s": "0"}, "--read-s must be a number of seconds above 0"),
        ({"--timeout-s": "-1"}, "timeout_s must be a number of seconds above 0"),
        ({"--target-url": "http://"}, "'http://' must be http://HOST:PORT"),
    ):
        words = [word for pair in (good | options).items() for word in pair]
        assert cli.main(["control", str(tmp_path / "bundle"), *words]) == 2, options
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    taken.close()
    words = [word for pair in good.items() for word in pair]
    assert cli.main(["control", str(tmp_path / "nothing"), *words]) == 2
    assert "no such bundle folder" in capsys.readouterr().err
    # A shipped one is taken by its name.
    assert cli.main(["control", "helm-base-v1", *words, "--interval-s", "9"]) == 2
    assert "the policy was trained for" in capsys.readouterr().err


def test_what_a_bundle_sees_of_a_masked_signal_is_nothing_to_its_network(tmp_path: Path) -> None:
    make_bundle_at(tmp_path / "bundle", INTERVAL_S)
    bundle = load_bundle(tmp_path / "bundle")
    steering = steering_of(bundle, INTERVAL_S)
    assert steering.neutral is not None
    mean = bundle.tensors["normaliser.mean"]
    shown = (steering.neutral - mean) / bundle.tensors["normaliser.var"] ** 0.5
    assert abs(shown[mean <= 1]).max() < 1e-6
    assert (steering.neutral <= 1).all()  # the random policy's means are beyond what there can be
    assert (steering.alpha_min, steering.alpha_max) == (0.15, 0.85)


def test_a_dry_run_asks_for_nothing() -> None:
    inside = ScriptedAdapter([steady(1, alpha=0.3), steady(2, alpha=None)])
    adapter = DryRun(inside, 0.5)
    assert adapter.apply(0.9, 1) == 0.5
    adapter.read()
    assert adapter.apply(0.9, 2) == 0.3
    adapter.read()
    assert adapter.apply(0.9, 3) == 0.3
    assert inside.applied == []


def test_the_log_tells_when_something_changes_and_not_every_interval() -> None:
    stream = io.StringIO()
    script: list[Any] = [
        *map(steady, range(3)),
        steady(3, rows=math.nan),
        steady(4, rows=math.inf),
        *map(steady, range(5, 9)),
    ]
    clock = FakeClock(len(script) - 0.999)
    with journal(stream) as log:
        monitor = Monitor(log)
        loop = ControlLoop(ScriptedAdapter(script), Recorded(0.6), 1.0, slo_ms=50.0, clock=clock, watch=monitor.watch)
        monitor.attach(loop)
        clock.busy = lambda: not loop._applier.idle
        loop.run(loop._stop)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["masked", "fallback", "recovered"]
    assert (lines[1]["cause"], lines[1]["level"], lines[2]["intervals"]) == ("not_finite", "warning", 2)
    assert all(line["time"].endswith("+00:00") for line in lines)
    families = {family.name: family for family in monitor.registry.collect()}
    counted = {sample.labels["cause"]: sample.value for sample in families["helm_rl_fallbacks"].samples}
    assert counted.keys() == set(Cause)
    assert (counted["not_finite"], sum(counted.values())) == (2, 2)


def gauges_after(script: list[Line], slo_ms: float = 50.0) -> dict[str, float]:
    """Return the gauges of a monitor once its loop has been through a script, by their names without helm_rl_."""
    clock = FakeClock(len(script) - 0.999)
    with journal(None) as log:
        monitor = Monitor(log)
        loop = ControlLoop(ScriptedAdapter(script), Recorded(0.6), 1.0, slo_ms=slo_ms, clock=clock, watch=monitor.watch)
        monitor.attach(loop)
        clock.busy = lambda: not loop._applier.idle
        loop.run(loop._stop)
    families = [family for family in monitor.registry.collect() if family.type == "gauge"]
    return {family.name.removeprefix("helm_rl_"): one.value for family in families for one in family.samples}


def test_what_was_measured_is_exported_as_the_controller_was_shown_it() -> None:
    found = gauges_after([steady(k) for k in range(4)], slo_ms=10.0)
    assert (found["slo_ms"], found["interval_seconds"]) == (10.0, 1.0)
    assert found["requests_per_second"] == pytest.approx(100.0)
    assert found["p99_ms"] == pytest.approx(20.0, rel=0.02)
    assert found["slow_ratio"] == pytest.approx(1.0)  # all took 20 ms
    assert found["kv_hit_ratio"] == pytest.approx(0.6)
    assert found["emb_hit_ratio"] == pytest.approx(0.75)


def test_what_the_server_cannot_give_is_not_exported() -> None:
    found = gauges_after([steady(k, rows_hit=None, latency=None) for k in range(4)])
    assert found["kv_hit_ratio"] == pytest.approx(0.6)
    assert not {"emb_hit_ratio", "p99_ms", "slow_ratio"} & found.keys()


@pytest.mark.parametrize("bad", [StaleTelemetry("gone"), steady(4, rows=math.inf)])
def test_of_an_interval_without_a_sound_reading_nothing_is_exported_as_measured(bad: Line) -> None:
    found = gauges_after([*map(steady, range(4)), bad])
    assert found["alpha_asked"] == 0.6
    assert not {"requests_per_second", "p99_ms", "slow_ratio", "kv_hit_ratio", "emb_hit_ratio"} & found.keys()
