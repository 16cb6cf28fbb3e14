"""`helm-rl control`: the control loop as a process beside a server, driven by a bundle."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import signal
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import tyro
from prometheus_client import start_http_server

from helm_rl.checkpoint import POLICY_FILE, Bundle, load_bundle
from helm_rl.control.layers import layers_of
from helm_rl.errors import UserError
from helm_rl.runtime.adapters.http import HttpAdapter
from helm_rl.runtime.counters import Adapter, Counters
from helm_rl.runtime.journal import journal, stderr
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.mapping import Mapping, load_mapping
from helm_rl.runtime.monitor import Monitor
from helm_rl.runtime.signals import Signals
from helm_rl.runtime.steering import steering_of
from helm_rl.shipped import bundle_path

_DEFAULT_INTERVAL_S = 1.0
_TIMEOUT = 0.9  # of an interval: an answer after that is no use to the next decision either
_LOOK_S = 0.5  # between looks whether the loop is still alive


@dataclass
class Args:
    """Read a server's counters at every interval, let a bundle decide, and POST the target, until SIGTERM or SIGINT.

    On SIGHUP the bundle is read again from the same path: a good one takes over at the next interval, from the alpha
    that is applied then; a bad one is named in the log, and the last good one stays. SIGTERM leaves alpha where it is,
    and the exit status is 0. Wherever there is nothing sound to decide upon alpha stays as it is, too, and the cause is
    counted. The log on stderr has a line of JSON for each thing that happens.
    """

    bundle: tyro.conf.Positional[Path]
    """The bundle folder, as `helm-rl export` writes it, or the name of one that ships with helm-rl."""
    url: str
    """The server's metrics, http://HOST:PORT, or with a path other than /metrics."""
    slo_ms: float
    """The latency that requests are to stay under: the SLO that the observation is in units of."""
    mapping: str = "helm-rl"
    """Which metric each signal is: helm-rl (its own server), vllm, triton, or a TOML file."""
    target_url: str | None = None
    """Where targets are POSTed as JSON, http://HOST:PORT/PATH; by default /target at the server of --url."""
    dry_run: bool = False
    """Decide, and export what would be asked for, but POST nothing: for servers that cannot be resized."""
    interval_s: float | None = None
    """Seconds between decisions, one that the policy was trained for; default: the bundle's, or 1 of several."""
    read_s: float | None = None
    """Also read the counters this often in between, so that a burst is found sooner; larger costs the server less."""
    timeout_s: float | None = None
    """Most seconds for an answer of the server; default: .9 of the interval."""
    listen: str = "127.0.0.1:9464"
    """HOST:PORT where this process's own metrics are served."""


def main(args: Args) -> None:
    """Control until a signal says otherwise.

    Raises:
        UserError: the bundle, the mapping or an option is wrong, or the port is taken.
        RuntimeError: the loop itself failed.
    """
    args = replace(args, bundle=bundle_path(args.bundle))
    with Signals() as signals, journal(stderr()) as log:
        _control(args, load_bundle(args.bundle), signals, Monitor(log))
        signals.ignore()  # the process ends, and one that comes twice must not kill it meanwhile


def _control(args: Args, bundle: Bundle, signals: Signals, monitor: Monitor) -> None:
    monitor.bundle = _labels(bundle)
    mapping = load_mapping(args.mapping)
    interval_s = _interval_s(args, bundle)
    steering = steering_of(bundle, interval_s)
    loop = ControlLoop(
        _adapter(args, mapping, interval_s),
        steering,
        interval_s,
        slo_ms=args.slo_ms,
        alpha0=mapping.alpha0,
        watch=monitor.watch,
    )
    monitor.attach(loop)
    host, port = _address(args.listen)
    server, _ = _serve(monitor, host, port)
    metrics = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    told = {"url": args.url, "metrics": metrics, "bundle": str(args.bundle), "interval_s": interval_s}
    monitor.say("start", told | monitor.bundle)
    try:
        with loop:
            _heed_signals(args, loop, monitor, signals)
    finally:
        server.shutdown()
        server.server_close()
        monitor.say("stop", {"alpha": loop.status.applied, "intervals": loop.status.intervals})


def _interval_s(args: Args, bundle: Bundle) -> float:
    if args.interval_s is not None:
        return args.interval_s
    trained = bundle.config.bounds.interval_s
    return trained[0] if len(trained) == 1 else _DEFAULT_INTERVAL_S


def _adapter(args: Args, mapping: Mapping, interval_s: float) -> Adapter:
    adapter = HttpAdapter(
        args.url,
        mapping,
        target_url=args.target_url,
        timeout_s=_TIMEOUT * interval_s if args.timeout_s is None else args.timeout_s,
        period_s=math.inf if args.read_s is None else _checked(args.read_s),
    )
    if args.dry_run:
        return DryRun(adapter, mapping.alpha0)
    if "alpha" not in mapping.signals and args.target_url is None:
        raise UserError(
            f"--mapping {args.mapping}: such a server takes no targets: give --target-url of what does, or --dry-run"
        )
    return adapter


def _serve(monitor: Monitor, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    try:
        server, thread = start_http_server(port, host, monitor.registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: of a host's name that is none
        raise UserError(f"--listen {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    server.RequestHandlerClass = _Quiet
    return server, thread


class _Quiet(WSGIRequestHandler):
    """Answers one of whoever asks for the metrics: no line of the log is theirs, and none holds a thread for long."""

    timeout = 5.0
    _slots = threading.BoundedSemaphore(16)

    def handle(self) -> None:
        """Answer, unless so many are being answered already."""
        if self._slots.acquire(blocking=False):
            hang_up = threading.Timer(self.timeout, self._hang_up)  # on who asks a byte at a time, too
            hang_up.daemon = True
            hang_up.start()
            try:
                with contextlib.suppress(OSError):  # who asked has gone
                    super().handle()
            finally:
                hang_up.cancel()
                self._slots.release()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send what is left."""
        with contextlib.suppress(OSError):
            super().finish()

    def get_stderr(self) -> TextIO:
        """Have what wsgiref would print go nowhere."""
        return io.StringIO()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no news."""


def _heed_signals(args: Args, loop: ControlLoop, monitor: Monitor, signals: Signals) -> None:
    """Reload and go on, until a signal or a failure of the loop ends it; of many for a reload one is enough."""
    while loop.running:
        came = signals.wait(_LOOK_S)
        if ends := came - {signal.SIGHUP}:
            monitor.say("signal", {"name": signal.Signals(min(ends)).name})
            return
        if not came:
            continue
        try:
            bundle = load_bundle(args.bundle)
            loop.replace(steering_of(bundle, loop.interval_s))
        except Exception as error:  # whatever it is, the last good one goes on
            monitor.reloads["bad"] += 1
            monitor.say("reload", {"result": "bad", "detail": str(error)}, logging.ERROR)
        else:
            monitor.reloads["ok"] += 1
            monitor.bundle = _labels(bundle)
            monitor.say("reload", {"result": "ok"} | monitor.bundle)


class DryRun:
    """Reads a server and asks it for nothing. alpha: what is applied, until counters say."""

    def __init__(self, adapter: Adapter, alpha: float | None) -> None:
        self._adapter = adapter
        self.period_s = adapter.period_s
        self._alpha = math.nan if alpha is None else alpha

    def read(self) -> Counters:
        """Read the server."""
        counters = self._adapter.read()
        self._alpha = self._alpha if counters.alpha is None else counters.alpha
        return counters

    def apply(self, alpha: float, revision: int) -> float:
        """Ask for nothing; return what is applied as it is."""
        return self._alpha


def _labels(bundle: Bundle) -> dict[str, str]:
    return {"policy_sha256": bundle.config.files[POLICY_FILE], "layers": "+".join(("base", *layers_of(bundle)))}


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65_536:
        raise UserError(f"--listen must be HOST:PORT, such as 127.0.0.1:9464, not {listen!r}")
    return host.strip("[]"), int(port)


def _checked(read_s: float) -> float:
    if not 0.0 < read_s < math.inf:
        raise UserError(f"--read-s must be a number of seconds above 0, not {read_s!r}")
    return read_s
