"""`helm-rl control`: the control loop as a process beside a server, driven by a bundle."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

import tyro
from prometheus_client import start_http_server

from helm_rl.checkpoint import POLICY_FILE, Bundle, load_bundle
from helm_rl.control.layers import layers_of
from helm_rl.errors import UserError
from helm_rl.runtime.adapters.http import HttpAdapter
from helm_rl.runtime.counters import Adapter, Counters
from helm_rl.runtime.loop import ControlLoop
from helm_rl.runtime.mapping import Mapping, load_mapping
from helm_rl.runtime.monitor import Monitor, journal
from helm_rl.runtime.steering import steering_of

_DEFAULT_INTERVAL_S = 1.0
_TIMEOUT = 0.9  # of an interval: an answer after that is no use to the next decision either
_LOOK_S = 0.5  # between looks whether the loop is still alive
_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


@dataclass
class Args:
    """Read a server's counters at every interval, let a bundle decide, and POST the target, until SIGTERM or SIGINT.

    On SIGHUP the bundle is read again from the same path: a good one takes over at the next interval, from the alpha
    that is applied then; a bad one is named in the log, and the last good one stays. SIGTERM leaves alpha where it is,
    and the exit status is 0. Wherever there is nothing sound to decide upon alpha stays as it is, too, and the cause is
    counted. The log on stderr has a line of JSON for each thing that happens.
    """

    bundle: tyro.conf.Positional[Path]
    """The bundle folder, as `helm-rl export` writes it."""
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
    with _signals() as came:
        _control(args, load_bundle(args.bundle), came)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket from which each signal that has come can be read as a byte, its number.

    From the first moment on, and whichever thread the system hands it to: threads that NumPy's libraries have made
    block none. Handlers that do more than this would run between any two steps of the main thread.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)


def _control(args: Args, bundle: Bundle, came: socket.socket) -> None:
    monitor = Monitor(journal())
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
    metrics = f"http://{host}:{server.server_port}/metrics"
    told = {"url": args.url, "metrics": metrics, "bundle": str(args.bundle), "interval_s": interval_s}
    monitor.say("start", told | monitor.bundle)
    try:
        with loop:
            _heed_signals(args, loop, monitor, came)
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


def _serve(monitor: Monitor, host: str, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, host, monitor.registry)
    except OSError as error:
        raise UserError(f"--listen {host}:{port}: {error.strerror or error}") from None


def _heed_signals(args: Args, loop: ControlLoop, monitor: Monitor, came: socket.socket) -> None:
    """Reload and go on, until a signal or a failure of the loop ends it."""
    came.settimeout(_LOOK_S)
    while loop.running:
        try:
            number = came.recv(1)[0]
        except TimeoutError:
            continue
        if number != signal.SIGHUP:
            monitor.say("signal", {"name": signal.Signals(number).name})
            return
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
